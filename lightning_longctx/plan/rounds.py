"""Tiles as the packed kernels of libraries take them: many sequences in one call, one kind of window for all of them.

In such a kernel the last query of a sequence stands at its last key, and a query sees the keys from ``left`` before its
own place to ``right`` behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from lightning_longctx.plan.tiles import Tile, full_tile


class Window(NamedTuple):
    """Query ``i`` sees key ``j`` iff ``-left <= j - i - (num_keys - num_queries) <= right``; -1 is no limit."""

    left: int = -1
    right: int = -1


FULL, CAUSAL_WINDOW = Window(), Window(-1, 0)


class Round(NamedTuple):
    """What one call computes: tiles of one kind, ascending in queries and in keys, none of which overlap."""

    window: Window
    tiles: tuple[Tile, ...]


def aligned_parts(tile: Tile) -> tuple[Tile, ...]:
    """Cut a tile into at most three that have a ``Window``; rows and keys that see nothing are dropped.

    Rows whose newest key lies inside the tile end where the kernel's diagonal ends, if their keys do. Of the others,
    which see the last key, those that see all keys are a full tile; the rest have a lower limit only.
    """
    first, last = max(0, -tile.hi), min(tile.num_queries, tile.num_keys - 1 - tile.lo)
    inside = first if tile.hi >= tile.num_keys - 1 else min(max(first, tile.num_keys - tile.hi), last)
    seeing_all = min(max(inside, -tile.lo), last)
    rows = ((first, inside), (inside, seeing_all), (seeing_all, last))
    return tuple(_part(tile, start, stop) for start, stop in rows if start < stop)


def _part(tile: Tile, start: int, stop: int) -> Tile:
    """Some rows with the keys that they see."""
    k_start, k_stop = max(0, start + tile.lo + 1), min(tile.num_keys, stop + tile.hi)
    shift = start - k_start  # the corner has moved, and the band with it
    whole = full_tile(tile.q_start + start, tile.q_start + stop, tile.k_start + k_start, tile.k_start + k_stop)
    return whole._replace(lo=max(tile.lo + shift, whole.lo), hi=min(tile.hi + shift, whole.hi))


def window_of(tile: Tile) -> Window:
    """How a kernel is told the band of a tile.

    Raises:
        ValueError: It cannot be; ``aligned_parts`` would have cut it.
    """
    if tile.is_full:
        return FULL
    offset = tile.num_keys - tile.num_queries
    left = None if tile.lo <= -tile.num_queries else offset - tile.lo - 1
    right = None if tile.hi >= tile.num_keys - 1 else tile.hi - offset
    # With more queries than keys, kernels that clamp their limits to the number of keys would see too little or too
    # much; an upper limit off the diagonal they would have to be told one by one.
    if offset < 0 or right not in (None, 0) or (left is not None and left < 0):
        raise ValueError(f"{tile} does not end at its last key: cut it with aligned_parts before it is packed.")
    return Window(-1 if left is None else left, -1 if right is None else right)


@lru_cache(maxsize=1024)
def rounds(tiles: tuple[Tile, ...]) -> tuple[Round, ...]:
    """Put tiles into as few calls as first fit finds.

    No query and no key is in two tiles of a round, so that results and gradients can be put where they belong at once.
    """
    found: dict[Window, list[list[Tile]]] = {}
    for tile in sorted(tiles):
        alike = found.setdefault(window_of(tile), [])
        fitting = next((some for some in alike if _is_behind(tile, some[-1])), None)
        if fitting is None:
            alike.append([tile])
        else:
            fitting.append(tile)
    return tuple(Round(window, tuple(some)) for window, alike in found.items() for some in alike)


def _is_behind(tile: Tile, other: Tile) -> bool:
    return tile.q_start >= other.q_stop and tile.k_start >= other.k_stop


def joined(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals ``(start, stop)`` in their order, neighbours joined."""
    found: list[tuple[int, int]] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
