"""Which layout suits a batch: work per rank and tokens per link, counted in closed form, so that a worker can ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.pieces import Piece, by_document, cut_pieces
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.layout import LayoutName, layout_ranges
from lightning_longctx.sequence.ranges import Ranges
from lightning_longctx.topology.links import Links

BLOCK = 64
"""Rows and columns that a kernel computes together, seen or not."""
MOST_PIECES = 20_000
"""Documents times ranks above which layouts that cut every document for every rank are not considered."""
GOOD_ENOUGH = 1.02
"""Time over that of perfectly even work without any transfer."""
HIDDEN = 0.75
"""Part of all but the slowest of work, inner and outer transfers that hides behind the slowest."""


@dataclass(frozen=True)
class LayoutCount:
    """What one layout costs, per attention call, forward and backward.

    Args:
        layout: Its name.
        imbalance: Most work of a rank over the mean.
        mean_bytes: Received by a rank on average.
        outer_bytes: Most received over one rank's outer link, if the ranks of a node share what enters it.
        compute_seconds: Of the rank with the most work.
        seconds: Estimate; only ratios are to be trusted.
        is_chosen: The fastest.
    """

    layout: LayoutName
    imbalance: float
    mean_bytes: int
    outer_bytes: int
    compute_seconds: float
    seconds: float
    is_chosen: bool = False


@lru_cache(maxsize=256)
def choose_layout(
    length: int,
    num_ranks: int,
    inner_ring: int,
    documents: Documents = (),
    num_rows: int = 1,
    masks: tuple[Mask, ...] = (CAUSAL,),
    head: int = 1,
    links: Links = Links(),  # noqa: B008  frozen
    shape: AttentionShape = AttentionShape(),  # noqa: B008  frozen
) -> LayoutName:
    """The fastest layout for a batch; arguments as in ``explain_layouts``. Pure: all ranks choose the same."""
    call = _Call(num_ranks, inner_ring, masks, links, shape.per_head_rank(head))
    return _best(_counts(length, documents, num_rows, call)).layout


def explain_layouts(
    length: int,
    num_ranks: int,
    inner_ring: int,
    documents: Documents = (),
    num_rows: int = 1,
    masks: tuple[Mask, ...] = (CAUSAL,),
    head: int = 1,
    links: Links = Links(),  # noqa: B008  frozen
    shape: AttentionShape = AttentionShape(),  # noqa: B008  frozen
) -> list[LayoutCount]:
    """Count every layout that could be the fastest.

    Args:
        length: Positions in one row.
        num_ranks: Context ranks.
        inner_ring: Context ranks on one node.
        documents: Cumulative lengths over all rows; empty is one document a row.
        num_rows: Rows whose documents differ (see ``SequenceRecord``).
        masks: Those of the model's layers, each as often as it occurs, or once if layers take turns.
        head: Head ranks that share the heads.
        links: Speeds.
        shape: Heads and sizes of the whole attention.

    Returns:
        The first is preferred where others are as good; exactly one is chosen.
    """
    call = _Call(num_ranks, inner_ring, masks, links, shape.per_head_rank(head))
    rows = list(_counts(length, documents, num_rows, call))
    best = _best(rows)
    return [replace(row, is_chosen=row is best) for row in rows]


class _Call(NamedTuple):
    num_ranks: int
    inner: int
    masks: tuple[Mask, ...]
    links: Links
    shape: AttentionShape


def _best(rows: Iterable[LayoutCount]) -> LayoutCount:
    """The fastest, or whole documents where nothing beats those by more: then the others need not be counted."""
    counted = []
    for row in rows:
        if row.layout == "balanced" and row.seconds * row.imbalance <= GOOD_ENOUGH * row.compute_seconds:
            return row
        counted.append(row)
    return min(counted, key=lambda row: row.seconds)


def _counts(length: int, documents: Documents, num_rows: int, call: _Call) -> Iterator[LayoutCount]:
    rows = tuple(row * length for row in range(num_rows + 1))
    isolated = any(mask.isolate for mask in call.masks)
    for layout in _candidates(documents if isolated else (), num_rows, call.num_ranks):
        shards = layout_ranges(layout, length, call.num_ranks, documents, num_rows)
        yield _count(layout, shards, {True: documents or rows, False: rows}, call)


class _Load(NamedTuple):
    """Of one rank, or summed."""

    pairs: float
    """Computed, by blocks."""
    missing: int
    """Tokens whose keys must come from elsewhere."""


def _candidates(documents: Documents, num_rows: int, num_ranks: int) -> list[LayoutName]:
    if len(documents) - 1 <= num_rows:
        return ["zigzag", "contiguous", "striped"]
    if len(documents) * num_ranks > MOST_PIECES:
        return ["balanced", "zigzag", "contiguous"]
    return ["balanced", "zigzag", "contiguous", "document_zigzag", "striped"]


def _count(
    layout: LayoutName, shards: Sequence[Ranges], documents_of: dict[bool, Documents], call: _Call
) -> LayoutCount:
    token_bytes = 2 * call.shape.key_bytes + call.shape.gradient_bytes
    per_pair = call.shape.seconds_per_pair(call.links)
    compute, seconds, outer, total = 0.0, 0.0, 0, _Load(0.0, 0)
    for mask, times in Counter(call.masks).items():
        documents = documents_of[mask.isolate]
        pieces = [cut_pieces(ranges, documents) for ranges in shards]
        nodes = [sum(pieces[first : first + call.inner], ()) for first in range(0, call.num_ranks, call.inner)]
        loads = [_load(rank, mask, documents) for rank in pieces]
        entering = max(missing_tokens(node, mask, documents) for node in nodes) * token_bytes // call.inner
        received = max(load.missing for load in loads)
        slowest = max(load.pairs for load in loads) * per_pair
        compute, outer = compute + times * slowest, max(outer, entering)
        shards_away = min(call.num_ranks - 1, -(-received * call.num_ranks // documents[-1]))
        waits = shards_away * call.links.latency_us * 1e-6
        inside = received * token_bytes if call.inner > 1 else 0
        seconds += times * (waits + _overlapped(slowest, inside, entering, call.links))
        pairs, missing = (sum(numbers) for numbers in zip(*loads, strict=True))
        total = _Load(total.pairs + times * pairs, total.missing + times * int(missing))
    calls = len(call.masks)
    return LayoutCount(
        layout=layout,
        imbalance=compute / (total.pairs * per_pair / call.num_ranks or 1.0),
        mean_bytes=total.missing * token_bytes // call.num_ranks // calls,
        outer_bytes=outer,
        compute_seconds=compute / calls,
        seconds=seconds / calls,
    )


def _overlapped(compute: float, inner_bytes: int, outer_bytes: int, links: Links) -> float:
    """Work and transfers hide behind each other, but never wholly."""
    parts = (compute, inner_bytes * 8e-9 / links.inner_gbits, outer_bytes * 8e-9 / links.outer_gbits)
    return HIDDEN * max(parts) + (1 - HIDDEN) * sum(parts)


def _load(pieces: Sequence[Piece], mask: Mask, documents: Documents) -> _Load:
    pairs = 0.0
    for part in pieces:
        start, stop = documents[part.document : part.document + 2]
        visible = visible_pairs(part.positions, start, stop, mask)
        pairs += visible + _wasted_pairs(part.positions, visible, mask)
    return _Load(pairs, missing_tokens(pieces, mask, documents))


def missing_tokens(pieces: Sequence[Piece], mask: Mask, documents: Documents) -> int:
    """Tokens that some query of ``pieces`` sees and that are not in ``pieces``; no less where ranges have steps."""
    missing = 0
    for document, parts in by_document(pieces).items():
        start, stop = documents[document : document + 2]
        seen = sorted(_seen_keys(part.positions, start, stop, mask) for part in parts)
        missing += _union(seen) - sum(len(part.positions) for part in parts)
    return missing


def visible_pairs(queries: range, start: int, stop: int, mask: Mask) -> int:
    """Pairs of some queries with the keys of their document ``start:stop``, in closed form."""
    size, step = len(queries), queries.step
    if not mask.causal:
        return size * (stop - start)
    most = mask.window or stop - start
    first = queries[0] - start + 1
    short = min(size, max(0, -(-(most - first) // step)))  # queries that see all keys before them
    return short * first + step * (short * (short - 1) // 2) + (size - short) * most


def _wasted_pairs(queries: range, visible: int, mask: Mask) -> float:
    """What kernels compute for nothing: half a block along each diagonal, and rows up to a whole block."""
    size = len(queries)
    diagonals = (mask.causal + (mask.window is not None)) * queries.step
    return diagonals * size * BLOCK / 2 + (-size % BLOCK) * visible / size


def _seen_keys(queries: range, start: int, stop: int, mask: Mask) -> tuple[int, int]:
    """First and last + 1 position of the keys that some query sees."""
    if not mask.causal:
        return start, stop
    return start if mask.window is None else max(start, queries[0] - mask.window + 1), queries[-1] + 1


def _union(intervals: Sequence[tuple[int, int]]) -> int:
    """Positions in ascending, perhaps overlapping intervals."""
    total, reached = 0, -1
    for start, stop in intervals:
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
