"""Who needs which keys. A *parcel* is the unit that is sent: tokens of one home that exactly the same ranks need."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.pieces import Pieces, by_document
from lightning_longctx.plan.tiles import band

Interval = tuple[int, int]
"""Local token indices ``start:stop``."""

ParcelIds = tuple[int, ...]
"""Ascending indices into the parcels of one home."""


class Parcel(NamedTuple):
    """Tokens of one home whose keys and values the same ranks need.

    Args:
        intervals: Where they are on their home, ascending.
        wanted_by: The other ranks that have work with them.
        num_tokens: How many.
    """

    intervals: tuple[Interval, ...]
    wanted_by: frozenset[int]
    num_tokens: int


Parcels = tuple[tuple[Parcel, ...], ...]
"""By home; tokens that nobody else needs are in none."""


@lru_cache(maxsize=64)
def plan_parcels(shards: tuple[Pieces, ...], mask: Mask) -> Parcels:
    """Ask the band planner which keys the queries of every other rank see, down to single tokens.

    Args:
        shards: Every rank's pieces.
        mask: Who may see whom.
    """
    groups = [by_document(pieces) for pieces in shards]
    return tuple(
        _parcels({rank: _seen(queries, groups[home], mask) for rank, queries in enumerate(groups) if rank != home})
        for home in range(len(shards))
    )


def divided(parcels: Parcels, parts: int) -> Parcels:
    """Cut parcels so that none has more than one of ``parts`` of what its home sends.

    Between inner rings a home's parcels travel one after another: work starts when the first is in, and gradients of
    the first go home while the next is worked on. Homes whose parcels are larger would keep all others waiting.
    """
    return tuple(
        tuple(
            piece
            for parcel in home
            for piece in _pieces(parcel, -(-sum(parcel.num_tokens for parcel in home) // parts))
        )
        for home in parcels
    )


def phases(parcels: tuple[Parcel, ...], parts: int) -> tuple[int, ...]:
    """When each parcel travels between inner rings: in one of ``parts`` of about equal size, in order.

    Returns:
        For every parcel the number of its part, ascending from 0.
    """
    total = sum(parcel.num_tokens for parcel in parcels)
    result, part, filled = [], 0, 0
    for parcel in parcels:
        # What is much smaller than a part does not make a round of its own.
        if part + 1 < parts and filled * parts * 4 >= total * 3 and parcel.num_tokens * parts * 2 >= total:
            part, filled = part + 1, 0
        result.append(part)
        filled += parcel.num_tokens
    return tuple(result)


def _pieces(parcel: Parcel, most_tokens: int) -> list[Parcel]:
    """Equal pieces of at most ``most_tokens``."""
    count = -(-parcel.num_tokens // most_tokens)
    edges = [parcel.num_tokens * index // count for index in range(count + 1)]
    return [
        Parcel(_between(parcel.intervals, first, last), parcel.wanted_by, last - first)
        for first, last in pairwise(edges)
    ]


def _between(intervals: tuple[Interval, ...], first: int, last: int) -> tuple[Interval, ...]:
    """The tokens ``first:last``, counted along the intervals."""
    found, before = [], 0
    for start, stop in intervals:
        low, high = max(first, before), min(last, before + stop - start)
        if low < high:
            found.append((start + low - before, start + high - before))
        before += stop - start
    return tuple(found)


def _seen(queries: dict[int, list], keys: dict[int, list], mask: Mask) -> list[Interval]:
    """Local indices of keys that some query sees, ascending and disjoint."""
    found = []
    for document in queries.keys() & keys.keys():
        for key in keys[document]:
            for query in queries[document]:
                if limits := band(query.positions, key.positions, mask):
                    first, last = max(0, limits[0] + 1), min(len(key.positions), limits[1] + len(query.positions))
                    found.append((key.start + first, key.start + last))
    merged: list[Interval] = []
    for start, stop in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _parcels(seen: dict[int, list[Interval]]) -> tuple[Parcel, ...]:
    """Sweep over the tokens of a home; wherever the set of those who see them changes, another parcel begins."""
    changes: defaultdict[int, set[int]] = defaultdict(set)
    for rank, intervals in seen.items():
        for edge in (edge for interval in intervals for edge in interval):
            changes[edge] ^= {rank}
    found: dict[frozenset[int], list[Interval]] = {}
    wanted_by: frozenset[int] = frozenset()
    before = 0
    for edge in sorted(changes):
        if wanted_by and edge > before:
            found.setdefault(wanted_by, []).append((before, edge))
        wanted_by, before = wanted_by ^ changes[edge], edge
    return tuple(
        Parcel(tuple(intervals), ranks, sum(stop - start for start, stop in intervals))
        for ranks, intervals in found.items()
    )
