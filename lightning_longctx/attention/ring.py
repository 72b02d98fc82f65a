"""Executes an attention plan on one rank, forward and backward.

Both passes are generators that yield once per slot, after that slot's sends: a real run drains them, and the lockstep
loopback (``testing.loopback``) advances all ranks of a mesh together inside one process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from lightning_longctx.attention.backends.contract import Backend
from lightning_longctx.attention.buffers import Buffers
from lightning_longctx.attention.merge import RunningSoftmax, add_sinks, sink_gradient
from lightning_longctx.attention.messages import kept_bytes, kept_memory
from lightning_longctx.attention.spans import batched
from lightning_longctx.attention.sums import TokenSum
from lightning_longctx.attention.traffic import Block, Traffic
from lightning_longctx.attention.transport import Transport
from lightning_longctx.plan.attention import AttentionPlan
from lightning_longctx.plan.cuts import halved
from lightning_longctx.plan.stacks import Stack, stacked
from lightning_longctx.plan.steps import Step
from lightning_longctx.plan.tiles import Tile

T = TypeVar("T")

_STACKED_ROWS = 2048


@dataclass(frozen=True)
class Engine:
    """What one rank needs to execute its plan.

    Args:
        plan: What to do.
        backend: Computes a tile.
        scale: Factor on the scores.
        transport: How to reach the others; None for one rank.
        buffers: Memory for what arrives.
        wire: What is sent is rounded to this dtype; None sends keys as they are and gradients wide.
    """

    plan: AttentionPlan
    backend: Backend
    scale: float
    transport: Transport | None = None
    buffers: Buffers = field(default_factory=Buffers)
    wire: torch.dtype | None = None

    def traffic(self, key: Tensor, value: Tensor, kept: Tensor) -> Traffic:
        """The messages of one pass."""
        views = kept_memory(self.plan, key, self.wire or key.dtype, kept)
        return Traffic(self.plan, self.transport, self.buffers, key, value, self.wire, views)

    def stacks(self, step: Step, like: Tensor, *, backward: bool) -> tuple[Stack, ...]:
        """Work of one step in tiles that the backend computes, those of one shape together."""
        place = (like.device, like.dtype, like.shape[0], backward)
        tiles = self.plan.tiles(step)
        if step.share == "all":
            return _cut(self.backend, tiles, *place)
        stacks = _cut(self.backend, tiles, *place)
        if len(stacks) == 1 and stacks[0].count == 1 and len(tiles) == 1:
            stacks = _cut(self.backend, halved(tiles[0], -(-tiles[0].num_queries // 2)), *place)
        middle = _middle(stacks)
        return stacks[:middle] if step.share == "first" else stacks[middle:]


@lru_cache(maxsize=1024)
def _cut(
    backend: Backend, tiles: tuple[Tile, ...], device: torch.device, dtype: torch.dtype, batch: int, backward: bool
) -> tuple[Stack, ...]:
    parts = [part for tile in tiles for part in backend.parts(tile, device, dtype, backward=backward)]
    # Rows of a batch and tiles of a stack both lie along the batch dim, and do not mix.
    return stacked(parts, _STACKED_ROWS) if batch == 1 and device.type == "cpu" else tuple(map(Stack, parts))


@lru_cache(maxsize=1024)
def _middle(stacks: tuple[Stack, ...]) -> int:
    """As many of the first stacks as make up half of the work."""
    done = list(accumulate(stack.num_pairs for stack in stacks))
    return bisect_left(done, done[-1] / 2) + 1 if done else 0


def run(steps: Generator[None, None, T]) -> T:
    """Drain a pass on this rank alone; the transport does the waiting."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def forward(
    engine: Engine, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        engine: What to do, and with what.
        query: [B, Hq, T, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, D].
        sinks: One more logit for every query head, [Hq].

    Returns:
        out [B, Hq, T, D] in the inputs' dtype, lse [B, Hq, T] in the wide one, and what backward need not fetch again
        as a tensor of bytes (empty unless the plan keeps something).
    """
    size = kept_bytes(engine.plan, key, engine.wire or key.dtype)
    kept = torch.empty(size, dtype=torch.uint8, device=key.device)
    traffic = engine.traffic(key, value, kept)
    running = RunningSoftmax(query, value.shape[-1])
    for step in engine.plan.forward.steps:
        block = traffic.enter(step)
        for stack in engine.stacks(step, query, backward=False):
            rows = batched(query, stack.queries)
            out, lse = engine.backend.forward(rows, *_columns(block, stack), stack.tile, engine.scale)
            running.add(stack.queries, out, lse)
        del block
        traffic.settle()
        yield
    traffic.finish()
    out, lse = running.result()
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.to(query.dtype), lse, kept


def backward(
    engine: Engine,
    grad: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    sinks: Tensor | None = None,
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Gradients of ``forward``. dQ stays; sums of dK/dV travel in the wide dtype.

    Args:
        engine: As in forward.
        grad: Gradient of out.
        saved: query, key, value, and what forward returned: the final out and lse, and what was kept.
        sinks: As in forward.

    Returns:
        dq, dk and dv in the inputs' dtype, and the gradient of the sinks.
    """
    query, key, value, out, lse, kept = saved
    plan, traffic = engine.plan, engine.traffic(key, value, kept)
    dquery, own = TokenSum(query), (TokenSum(key), TokenSum(value))
    for step in plan.backward.steps:
        block = traffic.enter(step)
        if block is not None:
            sums = own if step.home == plan.rank else tuple(map(TokenSum, block))
            for stack in engine.stacks(step, query, backward=True):
                dout, rows, outs, lses = (batched(tensor, stack.queries) for tensor in (grad, query, out, lse))
                keys, values = _columns(block, stack)
                parts = engine.backend.backward(dout, rows, keys, values, outs, lses, stack.tile, engine.scale)
                dquery.add(stack.queries, parts[0])
                sums[0].add(stack.keys, parts[1])
                sums[1].add(stack.keys, parts[2])
            if step.home != plan.rank:
                _pass_on(traffic, step, (sums[0].total(), sums[1].total()))
        del block
        traffic.settle()
        yield
    totals = (own[0].total(), own[1].total())
    for hop in plan.backward.returns:
        traffic.add_arrived(hop, totals, None)
    traffic.finish()
    dsinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
    return dquery.total().to(query.dtype), totals[0].to(key.dtype), totals[1].to(value.dtype), dsinks


def _pass_on(traffic: Traffic, step: Step, sums: Block) -> None:
    """Add what earlier contributors sent to this rank's share, and send each sum to the next contributor or home."""
    for hop in step.accumulators:
        traffic.add_arrived(hop, sums, step.parcels)
    for hop in step.gradient_sends:
        traffic.send(hop, sums, step.parcels)


def _columns(block: Block | None, stack: Stack) -> tuple[Tensor, Tensor]:
    if block is None:
        raise ValueError(f"{stack} has work, but its block has not come: the schedule and the tiles disagree.")
    return batched(block[0], stack.keys), batched(block[1], stack.keys)
