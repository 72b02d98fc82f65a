"""From a sequence record and a mask to the plan of one attention call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from lightning_longctx.plan.attention import AttentionPlan
from lightning_longctx.plan.clock import StepPairs, play
from lightning_longctx.plan.communication import SCHEDULES, Communication
from lightning_longctx.plan.counts import busiest_tokens, ring_tokens
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.parcels import ParcelIds, divided, plan_parcels
from lightning_longctx.plan.pieces import Pieces, cut_pieces
from lightning_longctx.plan.schedules import DoubleRing
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.plan.steps import Step
from lightning_longctx.plan.tiles import plan_tiles
from lightning_longctx.sequence.record import SequenceRecord

_MOST_PLAYED_RANKS = 16
"""With more, playing every candidate would keep the batch waiting: the busiest link decides."""

_PARTS, _PARTS_OF_ONE = 2, 4
"""Rounds in which the blocks of one inner ring pass through another; of a ring of one rank, whose rounds are short."""

AS_SENT = Communication()
SHAPE = AttentionShape()


@lru_cache(maxsize=256)
def plan_attention(
    sequence: SequenceRecord,
    mask: Mask = CAUSAL,
    communication: Communication = AS_SENT,
    shape: AttentionShape = SHAPE,
) -> AttentionPlan:
    """A pure function of what all ranks know, so that they agree without talking.

    Args:
        sequence: How the sequence is cut; of head ranks only the context rank counts.
        mask: Who may see whom.
        communication: How keys and values travel.
        shape: Of what a context rank computes; only ``schedule: auto`` looks at it.
    """
    shards = cut_shards(sequence, mask)
    ring = choose_ring(shards, sequence.inner_ring, mask, communication, shape)
    return AttentionPlan(sequence.rank, shards, mask, ring)


def cut_shards(sequence: SequenceRecord, mask: Mask) -> tuple[Pieces, ...]:
    """What every context rank holds, cut where attention does not pass."""
    documents = sequence.documents
    if not mask.isolate:
        ends = range(0, (sequence.num_rows + 1) * sequence.length, max(sequence.length, 1))
        documents = tuple(ends) if sequence.num_rows > 1 else ()
    return tuple(cut_pieces(ranges, documents) for ranges in sequence.shards)


@lru_cache(maxsize=256)
def visible_pairs_on_rank(sequence: SequenceRecord, mask: Mask) -> int:
    """(Query, key) pairs that the record's context rank computes, of one row (of all rows if they differ)."""
    shards = cut_shards(sequence, mask)
    own = shards[sequence.rank]
    return sum(tile.num_pairs for shard in shards for tile in plan_tiles(own, shard, mask))


@lru_cache(maxsize=64)
def choose_ring(
    shards: tuple[Pieces, ...], inner: int, mask: Mask, communication: Communication, shape: AttentionShape
) -> DoubleRing:
    """The route and the direction that take least time; of equals, those that send least.

    Zigzag under a causal mask prefers earlier ranks (-1): a later rank's block is wanted whole there, and only half of
    it after the wrap. Contiguous prefers later ranks, where chains end at the last rank.
    """
    windows = len(shards) // inner
    parts = 1 if windows == 1 else _PARTS if inner > 1 else _PARTS_OF_ONE
    parcels = divided(plan_parcels(shards, mask), parts)
    auto = communication.schedule == "auto" and any(parcels)
    routes = SCHEDULES if auto else (SCHEDULES[0] if communication.schedule == "auto" else communication.schedule,)
    rings = [
        DoubleRing(windows, inner, parcels, direction, route, communication.keep_kv, parts)
        for route in routes
        for direction in (-1, 1)
    ]
    return min(rings, key=_cost(shards, mask, communication, shape) if auto else ring_tokens)


def _cost(
    shards: tuple[Pieces, ...], mask: Mask, communication: Communication, shape: AttentionShape
) -> Callable[[DoubleRing], tuple[float, int]]:
    links = communication.links

    def played(ring: DoubleRing) -> tuple[float, int]:
        return play(ring, pairs, shape, links).seconds, ring_tokens(ring)

    def counted(ring: DoubleRing) -> tuple[float, int]:
        busiest = busiest_tokens(ring)
        return max(busiest["outer"] / links.outer_gbits, busiest["inner"] / links.inner_gbits), ring_tokens(ring)

    pairs = pair_counter(shards, mask)
    return played if len(shards) <= _MOST_PLAYED_RANKS else counted


def pair_counter(shards: tuple[Pieces, ...], mask: Mask) -> StepPairs:
    """Pairs of each step, counted once: all candidates, forward and backward, do the same work in another order."""
    found: dict[tuple[int, int, ParcelIds], int] = {}

    def pairs(ring: DoubleRing, rank: int, step: Step) -> int:
        key = (rank, step.home, step.parcels)
        if key not in found:
            found[key] = sum(tile.num_pairs for tile in AttentionPlan(rank, shards, mask, ring).tiles(step))
        if step.share == "first":
            return found[key] // 2
        return found[key] - (found[key] // 2 if step.share == "last" else 0)

    return pairs
