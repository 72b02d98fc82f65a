"""Tiles of one shape at even distances, to be computed by one call of a kernel: each call costs time of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_longctx.plan.tiles import Tile


class Span(NamedTuple):
    """``count`` slices of ``size`` tokens, the first tokens of which are ``step >= size`` apart."""

    start: int
    size: int
    count: int
    step: int

    def is_all_of(self, num_tokens: int) -> bool:
        """Whether the slices follow each other and are all tokens ``0 ... num_tokens - 1``."""
        together = self.count == 1 or self.step == self.size
        return self.start == 0 and together and self.count * self.size == num_tokens

    def part(self, index: int, count: int, first: int, last: int) -> Span:
        """The tokens ``first:last`` of each of ``count`` slices from ``index`` on."""
        return Span(self.start + index * self.step + first, last - first, count, self.step)


class Stack(NamedTuple):
    """Tiles, each ``q_step`` queries and ``k_step`` keys further on than the one before; no two share a query or a key.

    Args:
        tile: The first.
        count: How many.
        q_step: Distance of their first queries; at least as many as a tile has.
        k_step: Distance of their first keys; at least as many as a tile has.
    """

    tile: Tile
    count: int = 1
    q_step: int = 0
    k_step: int = 0

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """What to compute with ``queries`` and ``keys``: one tile, for every slice of them."""
        return (self.tile,)

    @property
    def queries(self) -> Span:
        """Where its queries are."""
        return Span(self.tile.q_start, self.tile.num_queries, self.count, self.q_step)

    @property
    def keys(self) -> Span:
        """Where its keys are."""
        return Span(self.tile.k_start, self.tile.num_keys, self.count, self.k_step)

    @property
    def num_pairs(self) -> int:
        """Visible pairs of all."""
        return self.count * self.tile.num_pairs


@dataclass(frozen=True)
class Table:
    """Tiles of any shapes and places, for a kernel that computes all of them at once.

    Args:
        placed: At least one, with local indices.
    """

    placed: tuple[Tile, ...]

    @cached_property
    def queries(self) -> Span:
        """The stretch that holds their queries."""
        first = min(tile.q_start for tile in self.placed)
        return Span(first, max(tile.q_stop for tile in self.placed) - first, 1, 0)

    @cached_property
    def keys(self) -> Span:
        """The stretch that holds their keys."""
        first = min(tile.k_start for tile in self.placed)
        return Span(first, max(tile.k_stop for tile in self.placed) - first, 1, 0)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """What to compute with ``queries`` and ``keys``: indices count from their starts."""
        q, k = self.queries.start, self.keys.start
        return tuple(
            tile._replace(
                q_start=tile.q_start - q, q_stop=tile.q_stop - q, k_start=tile.k_start - k, k_stop=tile.k_stop - k
            )
            for tile in self.placed
        )

    @cached_property
    def num_pairs(self) -> int:
        """Visible pairs of all."""
        return sum(tile.num_pairs for tile in self.placed)


Work = Stack | Table
"""What one call of a backend computes."""


def stacked(tiles: Iterable[Tile], most_rows: int) -> tuple[Stack, ...]:
    """Stack what can be stacked, small tiles first: along a diagonal they cover every query, and set its result.

    Args:
        tiles: Of one step.
        most_rows: Queries in one stack at most; a larger tile is a stack by itself. Results of a stack should stay in
            the cache until they are merged.
    """
    by_shape: defaultdict[tuple[int, int, int, int], list[Tile]] = defaultdict(list)
    for tile in tiles:
        by_shape[tile.num_queries, tile.num_keys, tile.lo, tile.hi].append(tile)
    return tuple(
        stack
        for (rows, keys, _, _), alike in sorted(by_shape.items(), key=lambda item: item[0][0] * item[0][1])
        for stack in _progressions(sorted(alike), rows, keys, max(1, most_rows // rows))
    )


def _progressions(tiles: list[Tile], rows: int, keys: int, most: int) -> list[Stack]:
    stacks: list[Stack] = []
    for tile in tiles:
        last = stacks[-1] if stacks else None
        if last and last.count < most and _continues(last, tile, rows, keys):
            steps = (tile.q_start - last.tile.q_start) // last.count, (tile.k_start - last.tile.k_start) // last.count
            stacks[-1] = Stack(last.tile, last.count + 1, *steps)
        else:
            stacks.append(Stack(tile))
    return stacks


def _continues(stack: Stack, tile: Tile, rows: int, keys: int) -> bool:
    q_step, k_step = tile.q_start - stack.tile.q_start, tile.k_start - stack.tile.k_start
    if stack.count == 1:
        return q_step >= rows and k_step >= keys
    return (q_step, k_step) == (stack.count * stack.q_step, stack.count * stack.k_step)
