"""The band planner: one rule that turns two lists of position ranges into rectangles of work.

For a query range and a key range with the same step ``s`` and starts ``q0``, ``k0``, the key at local index ``j``
stands at ``k0 + j*s`` and the query at ``i`` at ``q0 + i*s``. Causal (key <= query) then reads
``j - i <= (q0 - k0) // s`` and a window of W keys (query - key < W) reads ``j - i > (q0 - k0 - W) // s``: a *band*
``lo < j - i <= hi``.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.layout import Ranges


class Tile(NamedTuple):
    """Queries ``q_start:q_stop`` against keys ``k_start:k_stop`` of two shards, on local indices.

    Within the tile, query ``i`` sees key ``j`` (both counted from the tile's corner) iff ``lo < j - i <= hi``.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int

    @property
    def num_queries(self) -> int:
        """Rows of the rectangle."""
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
        """Columns of the rectangle."""
        return self.k_stop - self.k_start

    @property
    def is_full(self) -> bool:
        """Every query sees every key."""
        return self.hi >= self.num_keys - 1 and self.lo <= -self.num_queries

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs: the work, in units of one dot product."""
        return sum(
            max(0, min(i + self.hi, self.num_keys - 1) - max(i + self.lo + 1, 0) + 1) for i in range(self.num_queries)
        )


def plan_tiles(queries: Ranges, keys: Ranges, mask: Mask) -> tuple[Tile, ...]:
    """Cover every visible (query, key) pair of two shards exactly once.

    Args:
        queries: Ranges of global positions in the local order of the query shard.
        keys: The same for the keys.
        mask: What may be seen.

    Returns:
        Non-empty tiles, neighbouring full tiles merged. A shard against itself under a plain causal mask is one
        square causal tile, because local order is global order.
    """
    if queries == keys and mask == Mask(causal=True):
        size = sum(map(len, queries))
        return (Tile(0, size, 0, size, -size, 0),) if size else ()
    tiles = [
        tile
        for q_start, query in zip(_starts(queries), queries, strict=True)
        for k_start, key in zip(_starts(keys), keys, strict=True)
        if (tile := _tile(query, q_start, key, k_start, mask)) is not None
    ]
    return tuple(_merge_rows(_merge_columns(tiles)))


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
        _full(q_start, tile.q_stop, tile.k_start, left_stop),
        Tile(q_start, q_start + size, left_stop, left_stop + size, -size, 0),
        _full(q_start + size, tile.q_stop, left_stop, left_stop + size),
    )
    return tuple(part for part in parts if part.num_queries and part.num_keys)


def halved(tile: Tile, leaf: int) -> tuple[Tile, ...]:
    """Cut a square causal tile into two causal halves and the full rectangle below the first, down to ``leaf`` rows.

    For kernels that compute whole blocks along the diagonal: what they waste there shrinks with the leaf.
    """
    size = tile.num_queries
    if tile.is_full or size <= leaf:
        return (tile,)
    half = size // 2
    q_middle, k_middle = tile.q_start + half, tile.k_start + half
    first = Tile(tile.q_start, q_middle, tile.k_start, k_middle, -half, 0)
    second = Tile(q_middle, tile.q_stop, k_middle, tile.k_stop, half - size, 0)
    return (*halved(first, leaf), _full(q_middle, tile.q_stop, tile.k_start, k_middle), *halved(second, leaf))


def narrowed(tile: Tile, most_keys: int) -> tuple[Tile, ...]:
    """Cut a full tile into full ones of about equal width, at most ``most_keys``, for the sake of caches."""
    if not tile.is_full or tile.num_keys <= most_keys:
        return (tile,)
    count = -(-tile.num_keys // most_keys)
    edges = [tile.k_start + tile.num_keys * index // count for index in range(count + 1)]
    return tuple(_full(tile.q_start, tile.q_stop, start, stop) for start, stop in pairwise(edges))


def _tile(query: range, q_start: int, key: range, k_start: int, mask: Mask) -> Tile | None:
    if not len(query) or not len(key):
        return None
    if query.step != key.step:
        raise ValueError(f"ranges {query} and {key} have different steps: one batch has one layout.")
    num_queries, num_keys, offset = len(query), len(key), query.start - key.start
    hi = offset // query.step if mask.causal else num_keys - 1
    lo = (offset - mask.window) // query.step if mask.window is not None else -num_queries
    lo, hi = max(lo, -num_queries), min(hi, num_keys - 1)
    if hi <= -num_queries or lo >= num_keys - 1 or lo >= hi:
        return None
    return Tile(q_start, q_start + num_queries, k_start, k_start + num_keys, lo, hi)


def _starts(ranges: Ranges) -> list[int]:
    return [0, *accumulate(map(len, ranges))][: len(ranges)]


def _merge_columns(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles of the same queries whose keys are neighbours."""
    merged: list[Tile] = []
    for tile in tiles:
        last = merged[-1] if merged else None
        if last and last.is_full and tile.is_full and last[:2] == tile[:2] and last.k_stop == tile.k_start:
            merged[-1] = _full(last.q_start, last.q_stop, last.k_start, tile.k_stop)
        else:
            merged.append(tile)
    return merged


def _merge_rows(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles of the same keys whose queries are neighbours."""
    merged: list[Tile] = []
    for tile in tiles:
        last = merged[-1] if merged else None
        if last and last.is_full and tile.is_full and last[2:4] == tile[2:4] and last.q_stop == tile.q_start:
            merged[-1] = _full(last.q_start, tile.q_stop, last.k_start, last.k_stop)
        else:
            merged.append(tile)
    return merged


def _full(q_start: int, q_stop: int, k_start: int, k_stop: int) -> Tile:
    return Tile(q_start, q_stop, k_start, k_stop, q_start - q_stop, k_stop - k_start - 1)
