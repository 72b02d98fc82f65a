"""How long one attention call takes, forward and backward, and what it sends: before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from lightning_longctx.plan.choose import pair_counter, plan_attention
from lightning_longctx.plan.clock import play
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.topology.links import Links


@dataclass(frozen=True)
class Estimate:
    """Of one attention call, forward and backward.

    Args:
        schedule: How keys and values travel between context ranks; empty for a single one.
        seconds: Until the last rank is done.
        compute_seconds: Of the rank with the most work.
        outer_bytes: Most that any rank sends or receives between nodes, whichever is more.
        mean_bytes: Sent by a rank on average, over any link.
    """

    schedule: str
    seconds: float
    compute_seconds: float
    outer_bytes: int
    mean_bytes: int


@lru_cache(maxsize=256)
def estimate_attention(
    sequence: SequenceRecord,
    shape: AttentionShape = AttentionShape(),  # noqa: B008  frozen
    mask: Mask = CAUSAL,
    communication: Communication = Communication(),  # noqa: B008  frozen
    heads_per_node: int | None = None,
) -> Estimate:
    """Play one attention call.

    Args:
        sequence: How the sequence is cut, over context and head ranks; whose record it is plays no part.
        shape: Of the whole attention; head ranks share it.
        mask: Who may see whom.
        communication: How keys and values travel, over which links.
        heads_per_node: Head ranks of one group on one node; all of them by default.

    Returns:
        Seconds and bytes. Trust ratios only: kernels, and how far transfers hide, differ by machine.
    """
    local = shape.per_head_rank(sequence.head)
    plan, links = plan_attention(replace(sequence, rank=0), mask, communication, local), communication.links
    played = play(plan.ring, pair_counter(plan.shards, mask), local, links)
    exchange = _exchange(sequence, shape, links, heads_per_node or sequence.head)
    return Estimate(
        schedule=plan.ring.route if sequence.num_ranks > 1 else "",
        seconds=played.seconds + 2 * exchange.seconds,
        compute_seconds=played.compute_seconds,
        outer_bytes=played.outer_bytes + 2 * exchange.outer_bytes,
        mean_bytes=played.sent_bytes // sequence.num_ranks + 2 * exchange.sent_bytes,
    )


class _Exchange(NamedTuple):
    """The all-to-alls of one rank in one pass: one in, one out."""

    seconds: float
    outer_bytes: int
    sent_bytes: int


def _exchange(sequence: SequenceRecord, shape: AttentionShape, links: Links, heads_per_node: int) -> _Exchange:
    """Queries, keys and values go to the ranks of their heads, outputs come back. Nothing hides it."""
    head = sequence.head
    if head == 1:
        return _Exchange(0.0, 0, 0)
    tokens = max(sum(map(len, shard)) for shard in sequence.shards) // head
    one_head = shape.batch * tokens * shape.width * shape.item_size
    # Key/value heads fewer than ranks are replicated first: every rank gets one.
    to_one = one_head * (2 * shape.heads + 2 * max(shape.kv_heads, head)) // head
    inner, outer = to_one * (heads_per_node - 1), to_one * (head - heads_per_node)
    seconds = max(inner * 8e-9 / links.inner_gbits, outer * 8e-9 / links.outer_gbits) + 2e-6 * links.latency_us
    seconds += 2 * links.copy_seconds(inner + outer)  # each rank receives as much as it sends
    return _Exchange(seconds, outer, inner + outer)
