"""Tiles for packed kernels: cut so that each has a window, then put into rounds."""

from itertools import pairwise, product

import pytest

from lightning_longctx.plan.rounds import CAUSAL_WINDOW, FULL, Window, aligned_parts, joined, rounds, window_of
from lightning_longctx.plan.tiles import Tile, full_tile


def pairs_of_band(tile):
    return {
        (tile.q_start + i, tile.k_start + j)
        for i, j in product(range(tile.num_queries), range(tile.num_keys))
        if tile.lo < j - i <= tile.hi
    }


def pairs_of_window(tile, window):
    """As a kernel of flash-attn reads it, clamps included (``flash_api.cpp``: limits against the number of keys)."""
    left, right, keys = *window, tile.num_keys
    left, right = (-1 if left >= keys else left), (-1 if right >= keys else right)
    if left < 0 <= right:
        left = keys
    if right < 0 <= left:
        right = keys
    offset = keys - tile.num_queries
    return {
        (tile.q_start + i, tile.k_start + j)
        for i, j in product(range(tile.num_queries), range(keys))
        if (left < 0 or j >= i + offset - left) and (right < 0 or j <= i + offset + right)
    }


def small_bands():
    """Every band of every small rectangle, as tight as ``plan.tiles.band`` makes them."""
    for queries, keys in product(range(1, 6), range(1, 6)):
        for lo, hi in product(range(-queries, keys), range(1 - queries, keys)):
            if lo < hi and lo < keys - 1:
                yield Tile(3, 3 + queries, 7, 7 + keys, lo, hi)


def test_parts_cover_each_pair_once_and_have_a_window():
    for tile in small_bands():
        parts = aligned_parts(tile)
        seen = [pair for part in parts for pair in pairs_of_window(part, window_of(part))]
        assert len(parts) <= 3 and len(seen) == len(set(seen)) and set(seen) == pairs_of_band(tile), tile
        assert sum(part.num_pairs for part in parts) == tile.num_pairs


def test_parts_leave_no_row_without_a_key():
    for part in (part for tile in small_bands() for part in aligned_parts(tile)):
        queries, keys = ({pair[side] for pair in pairs_of_band(part)} for side in (0, 1))
        assert queries == set(range(part.q_start, part.q_stop)) and keys == set(range(part.k_start, part.k_stop))


def test_plain_masks_stay_whole():
    causal, window = Tile(0, 64, 0, 64, -64, 0), Tile(0, 64, 0, 64, -16, 0)
    assert aligned_parts(causal) == (causal,) and window_of(causal) == CAUSAL_WINDOW
    assert aligned_parts(full_tile(0, 8, 4, 6)) == (full_tile(0, 8, 4, 6),) and window_of(full_tile(0, 8, 4, 6)) == FULL
    assert aligned_parts(window) == (window,) and window_of(window) == Window(15, 0)
    remote = Tile(0, 64, 0, 64, 47, 63)  # the end of a window that began in the shard before
    assert [window_of(part) for part in aligned_parts(remote)] == [Window(0, -1)]


@pytest.mark.parametrize("tile", [Tile(0, 4, 0, 4, -4, 1), Tile(0, 6, 0, 3, -6, -3), Tile(0, 6, 0, 4, -2, 3)])
def test_a_band_without_a_window_is_refused(tile):
    with pytest.raises(ValueError, match="aligned_parts"):
        window_of(tile)


def test_rounds_hold_each_tile_once_without_overlap():
    ends = (0, 3, 4, 9, 9, 16)
    documents = [Tile(a, b, a, b, a - b, 0) for a, b in pairwise(ends) if a < b]
    others = [full_tile(0, 4, 16, 20), full_tile(4, 9, 16, 18), full_tile(0, 9, 20, 24)]
    found = rounds((*others, *documents))
    assert sorted(tile for round in found for tile in round.tiles) == sorted([*documents, *others])
    assert [round.window for round in found].count(CAUSAL_WINDOW) == 1, "all documents in one call"
    for round in found:
        assert all(window_of(tile) == round.window for tile in round.tiles)
        for one, other in pairwise(round.tiles):
            assert one.q_stop <= other.q_start and one.k_stop <= other.k_start
    assert rounds(()) == ()


def test_neighbours_are_joined():
    assert joined([(0, 2), (2, 5), (7, 8), (3, 4)]) == [(0, 5), (7, 8), (3, 4)]
