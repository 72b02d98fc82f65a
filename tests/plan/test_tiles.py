"""The band planner against the definition of a mask, pair by pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.tiles import Tile, causal_parts, halved, narrowed, plan_tiles
from lightning_longctx.sequence.layout import LAYOUTS, layout_ranges


def covered(tiles, num_queries, num_keys):
    """How often each pair of local indices is covered."""
    count = np.zeros((num_queries, num_keys), dtype=int)
    for tile in tiles:
        rows, columns = np.arange(tile.num_queries)[:, None], np.arange(tile.num_keys)
        offset = columns - rows
        count[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += (tile.lo < offset) & (offset <= tile.hi)
    return count


def visible(queries, keys, mask):
    positions = [[p for piece in ranges for p in piece] for ranges in (queries, keys)]
    allowed = [[mask.allows(i, j) for j in positions[1]] for i in positions[0]]
    return np.array(allowed, dtype=int).reshape(len(positions[0]), len(positions[1]))


MASKS = st.one_of(st.just(Mask()), st.just(Mask(causal=False)), st.integers(1, 60).map(lambda w: Mask(window=w)))


@given(st.integers(0, 50), st.integers(1, 6), st.sampled_from(LAYOUTS), MASKS, st.data())
def test_tiles_cover_each_visible_pair_once(length, num_ranks, layout, mask, data):
    shards = layout_ranges(layout, length, num_ranks)
    queries, keys = data.draw(st.sampled_from(shards)), data.draw(st.sampled_from(shards))
    tiles = plan_tiles(queries, keys, mask)
    expected = visible(queries, keys, mask)
    assert (covered(tiles, *expected.shape) == expected).all()
    assert sum(tile.num_pairs for tile in tiles) == expected.sum()
    assert all(tile.num_pairs for tile in tiles), "an empty tile is no work"


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_causal_parts_are_full_or_square_and_cover_the_tile(num_queries, num_keys, data):
    hi = data.draw(st.integers(1 - num_queries, num_keys - 1))
    tile = Tile(3, 3 + num_queries, 5, 5 + num_keys, -num_queries, hi)
    parts = causal_parts(tile)
    for part in parts:
        square = part.num_queries == part.num_keys and part.hi == 0
        assert (part.is_full or square) and part.num_queries and part.num_keys
    assert (covered(parts, 20, 20) == covered([tile], 20, 20)).all()


@given(st.integers(1, 40), st.integers(1, 9))
def test_halves_cover_the_square(size, leaf):
    square = Tile(2, 2 + size, 3, 3 + size, -size, 0)
    leaves = halved(square, leaf)
    assert all(part.is_full or part.num_queries == part.num_keys <= leaf for part in leaves)
    assert (covered(leaves, 50, 50) == covered([square], 50, 50)).all()


@given(st.integers(1, 40), st.integers(1, 9))
def test_columns_cover_the_rectangle(num_keys, most_keys):
    tile = Tile(2, 5, 3, 3 + num_keys, -3, num_keys - 1)
    columns = narrowed(tile, most_keys)
    assert all(part.is_full and part.num_keys <= most_keys for part in columns)
    assert (covered(columns, 50, 50) == covered([tile], 50, 50)).all()


def test_causal_parts_refuse_a_window():
    with pytest.raises(ValueError, match="window"):
        causal_parts(Tile(0, 4, 0, 4, -2, 0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_shard_is_one_square_causal_tile(layout):
    for ranges in layout_ranges(layout, 24, 3):
        assert plan_tiles(ranges, ranges, Mask()) == (Tile(0, 8, 0, 8, -8, 0),)


def test_zigzag_tiles_are_single_rectangles():
    early, late = layout_ranges("zigzag", 32, 4)[1], layout_ranges("zigzag", 32, 4)[2]
    assert plan_tiles(late, early, Mask()) == (Tile(0, 8, 0, 4, -8, 3),)  # all queries see the early chunk
    assert plan_tiles(early, late, Mask()) == (Tile(4, 8, 0, 8, -4, 7),)  # late queries see both chunks


def test_mask_refuses_nonsense():
    with pytest.raises(ValueError, match="window=0"):
        Mask(window=0)
    with pytest.raises(ValueError, match="causal"):
        Mask(causal=False, window=3)
