"""All ranks of a mesh stepped together inside one process: big grids of parity tests in seconds, float64 included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_longctx.attention import ring
from lightning_longctx.attention.backends import Needs, Scores, choose_backend
from lightning_longctx.attention.buffers import Buffers
from lightning_longctx.attention.dropout import CallDropout
from lightning_longctx.attention.heads import local_sinks, pack_heads, pack_tokens, unpack_heads, unpack_tokens
from lightning_longctx.attention.spans import in_a_row, taken_apart
from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.sequence import Documents, LayoutName, SequenceRecord
from lightning_longctx.testing.lockstep import LoopbackTransport, Mailbox, lockstep
from lightning_longctx.testing.oracle import take_shard

T = TypeVar("T")


class LoopbackResult(NamedTuple):
    """Full, un-sharded tensors in global order, and bytes sent by link on every rank (context-major, then head)."""

    out: Tensor
    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    dsinks: Tensor | None
    sent_bytes: tuple[Counter[str], ...]


@dataclass(frozen=True)
class Mesh:
    """What ``attention_over_ranks`` runs on.

    Args:
        layout: How to shard.
        num_ranks: Context ranks.
        inner: Ranks in an inner ring.
        head: Head ranks.
        documents: As in ``SequenceRecord``.
        num_rows: As in ``SequenceRecord``.
        communication: How keys and values travel.
    """

    layout: LayoutName
    num_ranks: int
    inner: int
    head: int = 1
    documents: Documents = ()
    num_rows: int = 1
    communication: Communication = Communication()

    def records(self, length: int) -> list[list[SequenceRecord]]:
        """By context rank and head rank."""
        return [
            [
                SequenceRecord(
                    length=length,
                    layout=self.layout,
                    num_ranks=self.num_ranks,
                    inner_ring=self.inner,
                    rank=rank,
                    head=self.head,
                    head_rank=head_rank,
                    documents=self.documents,
                    num_rows=self.num_rows,
                )
                for head_rank in range(self.head)
            ]
            for rank in range(self.num_ranks)
        ]


def attention_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    mesh: Mesh,
    *,
    mask: Mask = CAUSAL,
    sinks: Tensor | None = None,
    backend: str = "auto",
    scores: Scores | None = None,
    dropout: CallDropout | None = None,
) -> LoopbackResult:
    """Shard full tensors, run forward and backward on all ranks in lockstep, and join the results.

    Args:
        query: [B, Hq, N, D].
        key: [B, Hkv, N, D].
        value: [B, Hkv, N, D].
        grad: Gradient of the output, shaped like query.
        mesh: Degrees, layout and documents.
        mask: Who sees whom.
        sinks: [Hq].
        backend: Name of the backend.
        scores: How products become weights; None scales them by ``D ** -0.5``.
        dropout: What is dropped; its heads, rows and length are set here.
    """
    world = _World(mesh, query, mask, backend, scores or Scores(query.shape[-1] ** -0.5), dropout)
    queries, keys, values, grads = (world.shard(tensor) for tensor in (query, key, value, grad))
    queries, keys, values = world.to_heads(queries, keys, values)
    (grads,) = world.to_heads(grads)
    local = [None if sinks is None else local_sinks(sinks, mesh.head, u) for u in range(mesh.head)]

    outs = world.each(lambda e, r, u: ring.forward(e, queries[r][u], keys[r][u], values[r][u], local[u]))
    results = world.each(
        lambda e, r, u: ring.backward(e, grads[r][u], (queries[r][u], keys[r][u], values[r][u], *outs[r][u]), local[u])
    )
    assert all(len(mailbox) == 0 for mailbox in world.mailboxes), "messages were sent and never received"
    out = world.join(world.from_heads([[o[0] for o in row] for row in outs], query.shape[1]))
    dquery = world.join(world.from_heads([[dq for dq, *_ in row] for row in results], query.shape[1]))
    dkey = world.join(world.from_heads([[dk for _, dk, *_ in row] for row in results], key.shape[1]))
    dvalue = world.join(world.from_heads([[dv for _, _, dv, _ in row] for row in results], key.shape[1]))
    dsinks = None
    if sinks is not None:
        # Head ranks have other heads, context ranks other tokens.
        by_rank = [torch.cat([part for *_, part in row if part is not None]) for row in results]
        dsinks = torch.stack(by_rank).sum(0)
    return LoopbackResult(out, dquery, dkey, dvalue, dsinks, world.sent_bytes())


Grid = list[list[Tensor]]
"""By context rank and head rank."""


class _World:
    """All ranks of a mesh: every head rank has a ring of its own."""

    def __init__(
        self, mesh: Mesh, query: Tensor, mask: Mask, backend: str, scores: Scores, dropout: CallDropout | None
    ) -> None:
        self.mesh = mesh
        self.records = mesh.records(query.shape[2])
        self.mailboxes = [Mailbox() for _ in range(mesh.head)]
        options = (mask.window is not None, scores.softcap is not None, dropout is not None)
        engine = choose_backend(backend, Needs(query.device, query.dtype, query.shape[-1], *options))
        wire = getattr(torch, mesh.communication.dtype) if mesh.communication.dtype else None
        buffers, heads = Buffers(), query.shape[1] // mesh.head
        length = query.shape[2] if mesh.num_rows > 1 else None
        self.engines = [
            [
                ring.Engine(
                    plan=plan_attention(row[0], mask, mesh.communication),
                    backend=engine,
                    scores=scores,
                    dropout=dropout and replace(dropout, first_head=head_rank * heads, length=length),
                    transport=LoopbackTransport(mailbox, mesh.inner),
                    buffers=buffers,
                    wire=wire,
                )
                for head_rank, mailbox in enumerate(self.mailboxes)
            ]
            for row in self.records
        ]

    def shard(self, tensor: Tensor) -> Grid:
        """What each rank holds, [B, H, t, D]."""
        return [[_take_rows(tensor, record) for record in row] for row in self.records]

    def join(self, grid: Grid) -> Tensor:
        """Inverse of ``shard``."""
        whole = torch.full((*grid[0][0].shape[:2], self.records[0][0].length, grid[0][0].shape[3]), float("nan"))
        whole = whole.to(grid[0][0])
        for records, parts in zip(self.records, grid, strict=True):
            for record, part in zip(records, parts, strict=True):
                _put_rows(whole, part, record)
        return whole

    def to_heads(self, *grids: Grid) -> list[Grid]:
        """All-to-all of every context rank's head ranks, and rows one after another if they differ."""
        degree, buffers = self.mesh.head, Buffers()
        results: list[Grid] = [[] for _ in grids]
        for rank in range(self.mesh.num_ranks):
            tensors = [[grid[rank][u] for grid in grids] for u in range(degree)]
            if degree > 1:
                shapes = [tensor.shape for tensor in tensors[0]]
                packed = [pack_heads(held, degree, buffers) for held in tensors]
                tensors = [unpack_tokens(torch.stack([p[u] for p in packed]), shapes) for u in range(degree)]
            for index, result in enumerate(results):
                result.append([self._fold(held[index]) for held in tensors])
        return results

    def from_heads(self, grid: Grid, num_heads: int) -> Grid:
        """Inverse of ``to_heads``; copies of a head are summed."""
        degree, buffers = self.mesh.head, Buffers()
        result: Grid = []
        for row in grid:
            tensors = [self._unfold(tensor) for tensor in row]
            if degree > 1:
                batch, _, tokens, width = tensors[0].shape
                shape = (batch, num_heads, tokens // degree, width)
                packed = [pack_tokens([tensor], degree, buffers) for tensor in tensors]
                tensors = [unpack_heads(torch.stack([p[u] for p in packed]), [shape])[0] for u in range(degree)]
            result.append(tensors)
        return result

    def each(self, make: Callable[[ring.Engine, int, int], Generator[None, None, T]]) -> list[list[T]]:
        """One pass on all ranks, ring by ring."""
        by_ring = [
            lockstep([make(row[u], rank, u) for rank, row in enumerate(self.engines)]) for u in range(self.mesh.head)
        ]
        return [list(row) for row in zip(*by_ring, strict=True)]

    def sent_bytes(self) -> tuple[Counter[str], ...]:
        """Between context ranks."""
        return tuple(engine.transport.sent_bytes for row in self.engines for engine in row if engine.transport)

    def _fold(self, tensor: Tensor) -> Tensor:
        return tensor if self.mesh.num_rows == 1 else in_a_row(tensor)

    def _unfold(self, tensor: Tensor) -> Tensor:
        return tensor if self.mesh.num_rows == 1 else taken_apart(tensor, self.mesh.num_rows)


def _take_rows(tensor: Tensor, record: SequenceRecord) -> Tensor:
    rows = record.row_ranges
    if len(rows) == 1:
        return take_shard(tensor, rows[0], 2)
    return torch.cat([take_shard(tensor[i : i + 1], ranges, 2) for i, ranges in enumerate(rows)])


def _put_rows(whole: Tensor, part: Tensor, record: SequenceRecord) -> None:
    rows = record.row_ranges
    for i in range(whole.shape[0]):
        positions = [position for piece in rows[i if len(rows) > 1 else 0] for position in piece]
        whole[i, :, positions] = part[i]
