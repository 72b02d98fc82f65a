"""Executes an attention plan on one rank, forward and backward.

Both passes are generators that yield once per slot, after that slot's sends: a real run drains them, and the lockstep
loopback (``testing.loopback``) advances all ranks of a mesh together inside one process.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from torch import Tensor

from lightning_longctx.attention.backends.contract import Backend
from lightning_longctx.attention.merge import RunningSoftmax
from lightning_longctx.attention.sums import TokenSum
from lightning_longctx.attention.traffic import Block, Traffic
from lightning_longctx.attention.transport import Transport
from lightning_longctx.plan.choose import AttentionPlan
from lightning_longctx.plan.schedules import Step
from lightning_longctx.plan.tiles import Tile

T = TypeVar("T")


def run(steps: Generator[None, None, T]) -> T:
    """Drain a pass on this rank alone; the transport does the waiting."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def forward(
    plan: AttentionPlan,
    transport: Transport | None,
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        plan: What to do.
        transport: How to reach the others; None for one rank.
        backend: Computes a tile.
        query: [B, Hq, T, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, D].
        scale: Factor on the scores.

    Returns:
        out [B, Hq, T, D] in the inputs' dtype and lse [B, Hq, T] in the wide one, both contiguous.
    """
    traffic = Traffic(plan, transport, key, value)
    running = RunningSoftmax(query, value.shape[-1])
    for step in plan.forward.steps:
        block = traffic.enter(step)
        for tile in _parts(plan, step, backend, query):
            keys, values = _columns(block, tile)
            out, lse = backend.forward(_rows(query, tile), keys, values, tile, scale)
            running.add(tile.q_start, tile.q_stop, out, lse)
        del block
        traffic.settle()
        yield
    traffic.settle(keep=0)
    out, lse = running.result()
    return out.to(query.dtype), lse


def backward(
    plan: AttentionPlan,
    transport: Transport | None,
    backend: Backend,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    scale: float,
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """Gradients of ``forward``. dQ stays; sums of dK/dV travel in the wide dtype.

    Args:
        plan: What to do.
        transport: How to reach the others; None for one rank.
        backend: Computes a tile.
        saved: query, key, value, and the final out and lse.
        grad: Gradient of out.
        scale: Factor on the scores.

    Returns:
        dq, dk and dv, contiguous, in the inputs' dtype.
    """
    query, key, value, _, _ = saved
    traffic = Traffic(plan, transport, key, value)
    dquery, own = TokenSum(query), (TokenSum(key), TokenSum(value))
    for step in plan.backward.steps:
        block = traffic.enter(step)
        mine = step.home == plan.rank
        if block is not None:
            sums = own if mine else (TokenSum(block[0]), TokenSum(block[1]))
            for tile in _parts(plan, step, backend, query):
                rows = [_rows(tensor, tile) for tensor in (grad, query, saved[3], saved[4])]
                parts = backend.backward(rows[0], rows[1], *_columns(block, tile), rows[2], rows[3], tile, scale)
                dquery.add(tile.q_start, tile.q_stop, parts[0])
                sums[0].add(tile.k_start, tile.k_stop, parts[1])
                sums[1].add(tile.k_start, tile.k_stop, parts[2])
            if not mine:
                _pass_on(traffic, step, (sums[0].total, sums[1].total))
        del block
        traffic.settle()
        yield
    for hop in plan.backward.returns:
        traffic.add_arrived(hop, (own[0].total, own[1].total), traffic.all_pieces(plan.rank))
    traffic.settle(keep=0)
    return _result(dquery, query), _result(own[0], key), _result(own[1], value)


def _pass_on(traffic: Traffic, step: Step, sums: Block) -> None:
    """Add what earlier contributors sent to this rank's share, and send each sum to the next contributor or home."""
    for hop in step.accumulators:
        traffic.add_arrived(hop, sums, step.pieces)
    for hop in step.gradient_sends:
        traffic.send(hop, sums, step.pieces)


def _result(gradient: TokenSum, like: Tensor) -> Tensor:
    return gradient.total.to(like.dtype).contiguous()


def _parts(plan: AttentionPlan, step: Step, backend: Backend, query: Tensor) -> list[Tile]:
    return [part for tile in plan.tiles(step) for part in backend.parts(tile, query.device, query.dtype)]


def _rows(tensor: Tensor, tile: Tile) -> Tensor:
    return tensor[:, :, tile.q_start : tile.q_stop]


def _columns(block: Block | None, tile: Tile) -> tuple[Tensor, Tensor]:
    if block is None:
        raise ValueError(f"{tile} has work, but its block has not come: the schedule and the tiles disagree.")
    return block[0][:, :, tile.k_start : tile.k_stop], block[1][:, :, tile.k_start : tile.k_stop]
