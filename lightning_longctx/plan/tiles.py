"""The band planner: one rule that turns two lists of pieces into rectangles of work.

For a query range and a key range with the same step ``s`` and starts ``q0``, ``k0``, the key at local index ``j``
stands at ``k0 + j*s`` and the query at ``i`` at ``q0 + i*s``. Causal (key <= query) then reads
``j - i <= (q0 - k0) // s`` and a window of W keys (query - key < W) reads ``j - i > (q0 - k0 - W) // s``: a *band*
``lo < j - i <= hi``. Pieces of different documents do not meet.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.pieces import Piece, Pieces, by_document


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
        """Visible (query, key) pairs, in closed form: the work, in units of one dot product."""

        def below(band: int) -> int:
            """Pairs with ``j - i <= band``: row ``i`` has ``i + band + 1`` of them, from 0 to ``num_keys``."""
            return _clamped_sum(self.num_queries + band, self.num_keys) - _clamped_sum(band, self.num_keys)

        return below(self.hi) - below(self.lo)


def plan_tiles(queries: Pieces, keys: Pieces, mask: Mask) -> tuple[Tile, ...]:
    """Cover every visible (query, key) pair of two shards exactly once.

    Args:
        queries: Pieces of the query shard.
        keys: The same for the keys.
        mask: What may be seen within a document.

    Returns:
        Non-empty tiles, neighbouring full tiles merged. A document on one shard is one square causal tile under a plain
        causal mask, because local order is global order.
    """
    theirs = by_document(keys)
    squares = queries == keys and mask.causal and mask.window is None
    tiles: list[Tile] = []
    for document, pieces in by_document(queries).items():
        if squares:
            start, stop = pieces[0].start, pieces[-1].stop
            tiles.append(Tile(start, stop, start, stop, start - stop, 0))
        elif document in theirs:
            found = [_tile(query, key, mask) for query in pieces for key in theirs[document]]
            tiles += _merge_rows(_merge_columns([tile for tile in found if tile is not None]))
    return tuple(tiles)


def band(query: range, key: range, mask: Mask) -> tuple[int, int] | None:
    """``(lo, hi)`` between two ranges of one document, as tight as their lengths allow; None if nothing is seen."""
    num_queries, num_keys, offset = len(query), len(key), query.start - key.start
    if not num_queries or not num_keys:
        return None
    if query.step != key.step:
        raise ValueError(f"ranges {query} and {key} have different steps: one batch has one layout.")
    hi = offset // query.step if mask.causal else num_keys - 1
    lo = (offset - mask.window) // query.step if mask.window is not None else -num_queries
    lo, hi = max(lo, -num_queries), min(hi, num_keys - 1)
    return None if hi <= -num_queries or lo >= num_keys - 1 or lo >= hi else (lo, hi)


def full_tile(q_start: int, q_stop: int, k_start: int, k_stop: int) -> Tile:
    """Every query of the rectangle sees every key."""
    return Tile(q_start, q_stop, k_start, k_stop, q_start - q_stop, k_stop - k_start - 1)


def _tile(query: Piece, key: Piece, mask: Mask) -> Tile | None:
    limits = band(query.positions, key.positions, mask)
    return Tile(query.start, query.stop, key.start, key.stop, *limits) if limits else None


def _merge_columns(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles of the same queries whose keys are neighbours."""
    merged: list[Tile] = []
    for tile in tiles:
        last = merged[-1] if merged else None
        if last and last.is_full and tile.is_full and last[:2] == tile[:2] and last.k_stop == tile.k_start:
            merged[-1] = full_tile(last.q_start, last.q_stop, last.k_start, tile.k_stop)
        else:
            merged.append(tile)
    return merged


def _merge_rows(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles of the same keys whose queries are neighbours."""
    merged: list[Tile] = []
    for tile in tiles:
        last = merged[-1] if merged else None
        if last and last.is_full and tile.is_full and last[2:4] == tile[2:4] and last.q_stop == tile.q_start:
            merged[-1] = full_tile(last.q_start, tile.q_stop, last.k_start, last.k_stop)
        else:
            merged.append(tile)
    return merged


def _clamped_sum(last: int, most: int) -> int:
    """Sum over all y up to ``last`` of y clamped to ``0..most``."""
    bounded = min(max(last, 0), most)
    return bounded * (bounded + 1) // 2 + max(0, last - most) * most
