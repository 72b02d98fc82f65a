"""Systems that compute attention, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from torch import Tensor

from lightning_longctx.attention import attend, close_ring, open_ring
from lightning_longctx.attention.rings import find_ring
from lightning_longctx.cli.bench.attention_case import AttentionCase, forward_backward, take
from lightning_longctx.cli.bench.single_process import SingleProcess
from lightning_longctx.cli.bench.systems import Job, System
from lightning_longctx.plan import plan_attention
from lightning_longctx.sequence import SequenceRecord
from lightning_longctx.topology import CONTEXT, axis_rank

# A rank may wait for a slower one as long as it takes: the command notices a dead one by itself.
PATIENCE = timedelta(hours=24)


@dataclass(frozen=True)
class LongContext:
    """This package: a (double) ring over the context ranks, heads exchanged between the head ranks."""

    name: str = "longctx"

    def num_ranks(self, case: AttentionCase) -> int:
        """All."""
        return case.ranks

    def describe(self, case: AttentionCase) -> dict[str, str]:
        """The ring is ``flat`` or ``double``; other schedules have their names."""
        return {"layout": case.layout, "schedule": schedule_of(case)}

    def setup(self, case: AttentionCase, rank: int) -> Job:
        """See ``System.setup``."""
        mask = case.visible.mask
        ring = open_ring(case.degrees, rank, PATIENCE, case.communication)
        record = sequence_record(case, rank, ring)
        *leaves, grad = case.inputs(lambda whole: take(whole, record.ranges))
        joined = find_ring(ring)

        def run() -> dict[str, Tensor]:
            return forward_backward(
                lambda *qkv: attend(*qkv, sequence=record, causal=mask.causal, window=mask.window), leaves, grad
            )

        def sent_bytes() -> Mapping[str, int]:
            return Counter(joined.sent_bytes) if joined else {}

        return Job(run, lambda whole: take(whole, record.ranges), sent_bytes, lambda: close_ring(ring))


@dataclass(frozen=True)
class LongContextAlone:
    """This package on one rank: what its tiles cost when nothing is sent."""

    name: str = "longctx-1"

    def num_ranks(self, case: AttentionCase) -> int:
        """One."""
        return 1

    def describe(self, case: AttentionCase) -> dict[str, str]:
        """Nothing is laid out or sent."""
        return {"layout": "", "schedule": ""}

    def setup(self, case: AttentionCase, rank: int) -> Job:
        """See ``System.setup``."""
        return LongContext().setup(replace(case, ranks=1, head=1, inner_ring=None, layout="contiguous"), rank)


def attention_systems(case: AttentionCase) -> tuple[System, ...]:
    """What ``bench attention`` compares; ``single`` comes first, since the others are measured against it.

    Windows and documents also run on one rank of this package, so that what tiles cost can be told from what
    spreading them costs.
    """
    alone = (LongContextAlone(),) if case.visible.kind in ("window", "documents") else ()
    return (SingleProcess(), *alone, LongContext())


def sequence_record(case: AttentionCase, rank: int, ring: str = "") -> SequenceRecord:
    """What attention must know on one rank of the case."""
    degrees = case.degrees
    return SequenceRecord(
        length=case.tokens,
        layout=case.layout,
        num_ranks=degrees.context,
        inner_ring=degrees.inner,
        rank=axis_rank(degrees, rank, *CONTEXT),
        head=degrees.head,
        head_rank=axis_rank(degrees, rank, "head"),
        documents=case.documents,
        ring=ring,
        backend=case.backend,
    )


def schedule_of(case: AttentionCase) -> str:
    """The column ``schedule``: ``flat`` or ``double`` for a ring, else the name of the schedule that is taken."""
    shape = case.shape.per_head_rank(case.head)
    plan = plan_attention(sequence_record(case, rank=0), case.visible.mask, case.communication, shape)
    if plan.ring.route == "double_ring":
        return "flat" if case.degrees.windows == 1 else "double"
    return plan.ring.route
