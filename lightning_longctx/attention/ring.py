"""Executes an attention plan on one rank, forward and backward.

Both passes are generators that yield once per slot, after that slot's sends: a real run drains them, and the lockstep
loopback (``testing.loopback``) advances all ranks of a mesh together inside one process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from lightning_longctx.attention.backends.contract import Backend, Scores, Tiles
from lightning_longctx.attention.buffers import Buffers
from lightning_longctx.attention.dropout import CallDropout
from lightning_longctx.attention.merge import RunningSoftmax, add_sinks, sink_gradient
from lightning_longctx.attention.messages import kept_bytes, kept_memory
from lightning_longctx.attention.spans import batched
from lightning_longctx.attention.sums import TokenSum
from lightning_longctx.attention.traffic import Block, Traffic
from lightning_longctx.attention.transport import Transport
from lightning_longctx.plan.attention import AttentionPlan
from lightning_longctx.plan.cuts import halved
from lightning_longctx.plan.stacks import Stack, Table, Work, stacked
from lightning_longctx.plan.steps import Step
from lightning_longctx.plan.tiles import Tile

T = TypeVar("T")

_STACKED_ROWS = 2048


@dataclass(frozen=True)
class Engine:
    """What one rank needs to execute its plan.

    Args:
        plan: What to do.
        backend: Computes tiles.
        scores: How products become weights; dropout comes apart from it.
        dropout: What this call drops, if anything.
        transport: How to reach the others; None for one rank.
        buffers: Memory for what arrives.
        wire: What is sent is rounded to this dtype; None sends keys as they are and gradients wide.
    """

    plan: AttentionPlan
    backend: Backend
    scores: Scores
    dropout: CallDropout | None = None
    transport: Transport | None = None
    buffers: Buffers = field(default_factory=Buffers)
    wire: torch.dtype | None = None

    def traffic(self, key: Tensor, value: Tensor, kept: Tensor) -> Traffic:
        """The messages of one pass."""
        views = kept_memory(self.plan, key, self.wire or key.dtype, kept)
        return Traffic(self.plan, self.transport, self.buffers, key, value, self.wire, views)

    def with_queries(self, query: Tensor) -> Scores:
        """The scores of this rank's queries."""
        if self.dropout is None:
            return self.scores
        return replace(self.scores, dropout=self.dropout.of_queries(query, self.plan.query_ranges))

    def with_keys(self, scores: Scores, step: Step) -> Scores:
        """The same queries' scores with the keys of one step."""
        if self.dropout is None or scores.dropout is None:
            return scores
        return replace(scores, dropout=self.dropout.with_keys(scores.dropout, self.plan.key_ranges(step)))

    def work(self, step: Step, like: Tensor, *, backward: bool) -> tuple[Work, ...]:
        """Work of one step in calls of the backend."""
        # Rows of a batch and tiles of a stack both lie along the batch dim, and do not mix; nor do their positions.
        stacks = like.shape[0] == 1 and like.device.type == "cpu" and self.dropout is None
        options = (like.device, like.dtype, stacks, backward)
        tiles, halves = self.plan.tiles(step), step.share != "all"
        work = _cut(self.backend, tiles, *options, halves)
        if not halves:
            return work
        if len(tiles) == 1 and len(work) == 1:
            work = _cut(self.backend, halved(tiles[0], -(-tiles[0].num_queries // 2)), *options, halves)
        middle = _middle(work)
        return work[:middle] if step.share == "first" else work[middle:]


@lru_cache(maxsize=1024)
def _cut(
    backend: Backend, tiles: Tiles, device: torch.device, dtype: torch.dtype, stacks: bool, backward: bool, halves: bool
) -> tuple[Work, ...]:
    parts = tuple(part for tile in tiles for part in backend.parts(tile, device, dtype, backward=backward))
    if backend.takes_tables:
        middle = _middle(parts) if halves else len(parts)
        return tuple(Table(some) for some in (parts[:middle], parts[middle:]) if some)
    return stacked(parts, _STACKED_ROWS) if stacks else tuple(map(Stack, parts))


@lru_cache(maxsize=1024)
def _middle(work: tuple[Work | Tile, ...]) -> int:
    """As many of the first as make up half of the work."""
    done = list(accumulate(part.num_pairs for part in work))
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
    scores = engine.with_queries(query)
    for step in engine.plan.forward.steps:
        block, of_step = traffic.enter(step), engine.with_keys(scores, step)
        for work in engine.work(step, query, backward=False):
            rows, some = batched(query, work.queries), of_step.part(work.queries, work.keys)
            out, lse = engine.backend.forward(rows, *_columns(block, work), work.tiles, some)
            running.add(work.queries, out, lse)
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
    scores = engine.with_queries(query)
    for step in plan.backward.steps:
        block = traffic.enter(step)
        if block is not None:
            sums = own if step.home == plan.rank else tuple(map(TokenSum, block))
            of_step = engine.with_keys(scores, step)
            for work in engine.work(step, query, backward=True):
                dout, rows, outs, lses = (batched(tensor, work.queries) for tensor in (grad, query, out, lse))
                keys, values = _columns(block, work)
                some = of_step.part(work.queries, work.keys)
                parts = engine.backend.backward(dout, rows, keys, values, outs, lses, work.tiles, some)
                dquery.add(work.queries, parts[0])
                sums[0].add(work.keys, parts[1])
                sums[1].add(work.keys, parts[2])
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


def _columns(block: Block | None, work: Work) -> tuple[Tensor, Tensor]:
    if block is None:
        raise ValueError(f"{work} is to be done, but its block has not come: the schedule and the tiles disagree.")
    return batched(block[0], work.keys), batched(block[1], work.keys)
