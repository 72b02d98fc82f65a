"""Cuts of a tile into such as a kernel computes, and computes fast. Each covers every pair of the tile once."""

from __future__ import annotations

from itertools import pairwise

from lightning_longctx.plan.tiles import Tile, full_tile


def causal_parts(tile: Tile) -> tuple[Tile, ...]:
    """Cut a tile without a lower bound into full rectangles and square causal ones (``hi == 0``).

    For backends that know no other band; squares leave no doubt about where a kernel aligns its diagonal. Rows and
    columns that nothing sees are dropped.

    Raises:
        ValueError: The tile has a lower bound (a window).
    """
    if tile.lo > -tile.num_queries:
        raise ValueError(f"{tile} has a window: a backend that knows only causal tiles cannot compute it.")
    if tile.is_full:
        return (tile,)
    left_stop = tile.k_start + max(tile.hi, 0)
    q_start = tile.q_start + max(-tile.hi, 0)
    size = min(tile.q_stop - q_start, tile.k_stop - left_stop)
    parts = (
        full_tile(q_start, tile.q_stop, tile.k_start, left_stop),
        Tile(q_start, q_start + size, left_stop, left_stop + size, -size, 0),
        full_tile(q_start + size, tile.q_stop, left_stop, left_stop + size),
    )
    return tuple(part for part in parts if part.num_queries and part.num_keys)


def halved(tile: Tile, leaf: int) -> tuple[Tile, ...]:
    """Cut a square causal tile into two causal halves and the full rectangle below the first, down to ``leaf`` rows.

    For kernels that compute whole blocks along the diagonal: what they waste there shrinks with the leaf.
    """
    size = tile.num_queries
    if size <= leaf or not is_causal_square(tile):
        return (tile,)
    half = size // 2
    q_middle, k_middle = tile.q_start + half, tile.k_start + half
    first = Tile(tile.q_start, q_middle, tile.k_start, k_middle, -half, 0)
    second = Tile(q_middle, tile.q_stop, k_middle, tile.k_stop, half - size, 0)
    return (*halved(first, leaf), full_tile(q_middle, tile.q_stop, tile.k_start, k_middle), *halved(second, leaf))


def narrowed(tile: Tile, most_keys: int) -> tuple[Tile, ...]:
    """Cut a full tile into full ones of about equal width, at most ``most_keys``, for the sake of caches."""
    if not tile.is_full or tile.num_keys <= most_keys:
        return (tile,)
    count = -(-tile.num_keys // most_keys)
    edges = [tile.k_start + tile.num_keys * index // count for index in range(count + 1)]
    return tuple(full_tile(tile.q_start, tile.q_stop, start, stop) for start, stop in pairwise(edges))


def banded_blocks(tile: Tile, most_rows: int) -> tuple[Tile, ...]:
    """Cut a tile into blocks of at most ``most_rows`` queries, each with no more keys than its queries see.

    No row of a block is without a key: rows that see nothing are dropped first. Blocks in the middle of a long band are
    all alike, so that a kernel which wants a mask needs only one.
    """
    first, last = max(0, -tile.hi), min(tile.num_queries, tile.num_keys - 1 - tile.lo)
    blocks = []
    for start in range(first, last, most_rows):
        stop = min(start + most_rows, last)
        k_start, k_stop = max(0, start + tile.lo + 1), min(tile.num_keys, stop + tile.hi)
        # The corner has moved by (start, k_start), and the band with it.
        shift = start - k_start
        lo, hi = max(tile.lo + shift, start - stop), min(tile.hi + shift, k_stop - k_start - 1)
        block = (tile.q_start + start, tile.q_start + stop, tile.k_start + k_start, tile.k_start + k_stop)
        blocks.append(Tile(*block, lo, hi))
    return tuple(blocks)


def window_parts(tile: Tile, most_rows: int) -> tuple[Tile, ...]:
    """Cut a band into full tiles, causal squares along its upper edge and *late* squares along its lower edge.

    In a late square a query ``i`` sees the keys ``j >= i`` (``lo == -1``): what a window leaves of its oldest keys.
    Only these need a bias in a kernel that knows no windows. Bands narrower than ``most_rows`` stay whole blocks.
    """
    return tuple(part for block in banded_blocks(tile, most_rows) for part in _edges(block))


def late_halved(tile: Tile, leaf: int) -> tuple[Tile, ...]:
    """Cut a late square into two late halves and the full rectangle right of the first, down to ``leaf`` rows."""
    size = tile.num_queries
    if size <= leaf:
        return (tile,)
    half = size // 2
    q_middle, k_middle = tile.q_start + half, tile.k_start + half
    first = Tile(tile.q_start, q_middle, tile.k_start, k_middle, -1, half - 1)
    second = Tile(q_middle, tile.q_stop, k_middle, tile.k_stop, -1, size - half - 1)
    corner = full_tile(tile.q_start, q_middle, k_middle, tile.k_stop)
    return (*late_halved(first, leaf), corner, *late_halved(second, leaf))


def is_causal_square(tile: Tile) -> bool:
    """Whether a query ``i`` of the square sees the keys ``j <= i``."""
    return tile.num_queries == tile.num_keys and tile.hi == 0 and tile.lo <= -tile.num_queries


def is_late_square(tile: Tile) -> bool:
    """Whether a query ``i`` of the square sees the keys ``j >= i``."""
    return tile.num_queries == tile.num_keys > 1 and tile.lo == -1 and tile.hi == tile.num_keys - 1


def _edges(block: Tile) -> list[Tile]:
    """Cut one of ``banded_blocks``: a full middle, and what lies beside it."""
    rows, keys = block.num_queries, block.num_keys
    if block.hi - block.lo < rows:
        return [block]
    left = max(0, rows + block.lo)  # as many of the oldest keys are hidden from some rows
    upper = max(0, keys - block.hi) if keys - block.hi > 1 else 0  # and as many of the newest
    seen = rows - 1 - left  # rows before this one see all of the oldest keys
    parts = [
        (0, rows, left, keys - upper, -rows, keys),
        (upper, rows, keys - upper, keys, -rows, keys),
        (0, upper, keys - upper, keys, -upper, 0),
        (0, seen, 0, left, -rows, keys),
        (seen, seen + left, 0, left, -1, left - 1),
    ]
    return [
        Tile(
            block.q_start + q_start,
            block.q_start + q_stop,
            block.k_start + k_start,
            block.k_start + k_stop,
            max(lo, q_start - q_stop),
            min(hi, k_stop - k_start - 1),
        )
        for q_start, q_stop, k_start, k_stop, lo, hi in parts
        if q_start < q_stop and k_start < k_stop
    ]
