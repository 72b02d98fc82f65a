"""Tiles of one shape at even distances, to be computed by one call of a kernel: each call costs time of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
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
