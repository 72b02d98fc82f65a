"""Tile tables: which blocks of a kernel meet, decided once on the CPU.

A tile is six numbers ``(q_start, q_stop, k_start, k_stop, lo, hi)``: query ``i`` of the tile sees its key ``j`` iff
``lo < j - i <= hi``, both counted from its corner. A kernel cuts queries and keys into blocks; one program owns one
block of the outer side (queries in forward and for dq, keys for dk and dv) and walks over blocks of the inner side. The
*schedule* says which: *runs* of inner blocks of which everything is visible, which need no mask, and single *visits* of
all others, each with the tiles that touch that pair of blocks. So the work does not depend on how many tiles there are:
documents of two tokens cost no more products than one long document.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Table = tuple[tuple[int, ...], ...]
"""Tiles that share no visible pair: one seen in two tiles would count once or twice, as blocks fall."""

_MAX_TOKENS = 2**30
"""Differences of indices are 32-bit numbers in kernels; offsets in memory are 64-bit ones."""


class Schedule(NamedTuple):
    """What the programs of one launch do; int64 throughout.

    Lists of outer block ``b`` are ``runs[run_starts[b]:run_starts[b + 1]]``, and so on.
    """

    order: Tensor
    """[blocks] outer blocks, those with most work first, so that no long one is begun last."""
    run_starts: Tensor
    """[blocks + 1]"""
    runs: Tensor
    """[runs, 2] first inner block and the one after the last."""
    visit_starts: Tensor
    """[blocks + 1]"""
    visits: Tensor
    """[visits, 3] inner block, and where its tiles begin and end in ``members``."""
    members: Tensor
    """[members] indices into ``tiles``."""
    tiles: Tensor
    """[tiles, 6] ``q_start, q_stop, k_start, k_stop, below, above``: the band is ``below < key - query <= above``."""


@lru_cache(maxsize=256)
def schedule_on(
    device: torch.device, table: Table, sizes: tuple[int, int], blocks: tuple[int, int], by_key: bool
) -> Schedule:
    """``schedule`` on a device, copied there once for all layers that have the same tiles."""
    return Schedule(*(part.to(device) for part in schedule(table, sizes, blocks, by_key)))


@lru_cache(maxsize=256)
def schedule(table: Table, sizes: tuple[int, int], blocks: tuple[int, int], by_key: bool = False) -> Schedule:
    """Plan one launch: a pure function of numbers.

    Args:
        table: The tiles.
        sizes: Number of queries and of keys.
        blocks: Block sizes of queries and of keys.
        by_key: Programs own blocks of keys, not of queries.

    Raises:
        ValueError: A tile that reaches over the queries or keys, or more than 2^30 of them.
    """
    tiles = checked_tiles(table, sizes)
    outer, inner = (1, 0) if by_key else (0, 1)
    near = _turned(tiles) if by_key else tiles
    num_blocks = -(-sizes[outer] // blocks[outer])
    tile, block = _touched(near, blocks[outer])
    runs, masked = _ranges(near[tile], block, sizes[outer], blocks[outer], blocks[inner])
    is_run = runs[:, 1] > runs[:, 0]
    by_block = block[is_run].argsort(stable=True)
    visits, visit_blocks, members = _visits(tile, block, masked, -(-sizes[inner] // blocks[inner]))
    runs, run_blocks = runs[is_run][by_block], block[is_run][by_block]
    work = torch.zeros(num_blocks, dtype=torch.int64)
    work.index_add_(0, run_blocks, runs[:, 1] - runs[:, 0]).index_add_(0, visit_blocks, torch.ones_like(visit_blocks))
    return Schedule(
        work.argsort(descending=True, stable=True),
        _starts(run_blocks, num_blocks),
        runs.contiguous(),
        _starts(visit_blocks, num_blocks),
        visits,
        members,
        _bands(tiles),
    )


def checked_tiles(table: Table, sizes: tuple[int, int]) -> Tensor:
    """Tiles as an int64 tensor [tiles, 6], bands clamped to what the lengths allow; those that show nothing are gone.

    Raises:
        ValueError: See ``schedule``.
    """
    if max(sizes) > _MAX_TOKENS:
        raise ValueError(f"{sizes[0]} queries and {sizes[1]} keys on one rank: a kernel takes at most {_MAX_TOKENS}.")
    tiles = torch.tensor(table, dtype=torch.int64).reshape(-1, 6)
    q_start, q_stop, k_start, k_stop, lo, hi = tiles.unbind(1)
    wrong = (q_start < 0) | (q_stop > sizes[0]) | (k_start < 0) | (k_stop > sizes[1])
    if wrong.any():
        raise ValueError(f"tile {tuple(tiles[wrong][0].tolist())} reaches over {sizes[0]} queries or {sizes[1]} keys.")
    num_queries, num_keys = q_stop - q_start, k_stop - k_start
    lo, hi = torch.maximum(lo, -num_queries), torch.minimum(hi, num_keys - 1)
    seen = (num_queries > 0) & (num_keys > 0) & (lo < hi) & (hi > -num_queries) & (lo < num_keys - 1)
    return torch.stack([q_start, q_stop, k_start, k_stop, lo, hi], 1)[seen]


def _turned(tiles: Tensor) -> Tensor:
    """The same tiles with queries and keys exchanged: ``lo < j - i <= hi`` is ``-hi - 1 < i - j <= -lo - 1``."""
    q_start, q_stop, k_start, k_stop, lo, hi = tiles.unbind(1)
    return torch.stack([k_start, k_stop, q_start, q_stop, -hi - 1, -lo - 1], 1)


def _bands(tiles: Tensor) -> Tensor:
    corner = tiles[:, 2] - tiles[:, 0]
    return torch.cat([tiles[:, :4], tiles[:, 4:] + corner[:, None]], 1)


def _touched(tiles: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Every (tile, outer block) pair that shares a row."""
    first, last = tiles[:, 0] // size, (tiles[:, 1] - 1) // size
    return _expanded(first, last + 1)


def _expanded(first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """For ranges of numbers: which range, and the number, for each of them."""
    count = stop - first
    index = torch.arange(len(first)).repeat_interleave(count)
    begun = count.cumsum(0) - count
    return index, first[index] + torch.arange(len(index)) - begun[index]


def _ranges(tiles: Tensor, block: Tensor, num_rows: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Inner blocks that a tile shows to an outer block.

    Args:
        tiles: [n, 6], rows first.
        block: [n] outer block.
        num_rows: Of the outer side.
        rows: Of an outer block.
        columns: Of an inner block.

    Returns:
        [n, 2] inner blocks of which every row of the outer block sees everything, and [2, n, 2] the others, before and
        after those.
    """
    start, stop, left, right, lo, hi = tiles.unbind(1)
    top, bottom = block * rows, ((block + 1) * rows).clamp(max=num_rows)
    covered = (start <= top) & (bottom <= stop)
    first, last = torch.maximum(top, start) - start, torch.minimum(bottom, stop) - 1 - start
    # A row sees one stretch of columns, the next row the same one further on: their union and their intersection.
    some = [torch.maximum(left, left + first + lo + 1), torch.minimum(right, left + last + hi + 1)]
    every = [torch.maximum(left, left + last + lo + 1), torch.minimum(right, left + first + hi + 1)]
    begin, end = some[0] // columns, -(-some[1] // columns)
    end = torch.where(some[0] < some[1], end, begin)
    inside, outside = -(-every[0] // columns), every[1] // columns
    full = covered & (inside < outside)
    inside, outside = torch.where(full, inside, end), torch.where(full, outside, end)
    masked = torch.stack([torch.stack([begin, inside], 1), torch.stack([outside, end], 1)])
    return torch.stack([inside, outside], 1), masked


def _visits(tile: Tensor, block: Tensor, masked: Tensor, num_inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group the (outer block, inner block, tile) triples by their blocks."""
    index, inner = _expanded(*masked.reshape(-1, 2).unbind(1))
    source = index % max(len(tile), 1)
    place = block[source] * num_inner + inner
    order = place.argsort(stable=True)
    places, counts = place[order].unique_consecutive(return_counts=True)
    stops = counts.cumsum(0)
    visits = torch.stack([places % max(num_inner, 1), stops - counts, stops], 1)
    return visits, places // max(num_inner, 1), tile[source][order]


def _starts(sorted_blocks: Tensor, num_blocks: int) -> Tensor:
    return torch.searchsorted(sorted_blocks.contiguous(), torch.arange(num_blocks + 1))
