"""The band planner against the definition of a mask, pair by pair, with and without packed documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.pieces import cut_pieces
from lightning_longctx.plan.tiles import Tile, band, plan_tiles
from lightning_longctx.sequence.layout import LAYOUTS, layout_ranges
from tests.plan.pairs import MASKS, PACKED, covered, held


def visible(queries, keys, mask):
    rows, columns = held(queries), held(keys)
    allowed = [[mask.allows(i, j) and one == other for j, other in columns] for i, one in rows]
    return np.array(allowed, dtype=int).reshape(len(rows), len(columns))


@given(PACKED, st.integers(1, 6), st.sampled_from(LAYOUTS), MASKS, st.data())
def test_tiles_cover_each_visible_pair_once(packed, num_ranks, layout, mask, data):
    length, documents = packed
    shards = [cut_pieces(ranges, documents) for ranges in layout_ranges(layout, length, num_ranks, documents)]
    queries, keys = data.draw(st.sampled_from(shards)), data.draw(st.sampled_from(shards))
    tiles = plan_tiles(queries, keys, mask)
    expected = visible(queries, keys, mask)
    assert (covered(tiles, *expected.shape) == expected).all()
    assert sum(tile.num_pairs for tile in tiles) == expected.sum()
    assert all(tile.num_pairs for tile in tiles), "an empty tile is no work"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_shard_is_one_square_causal_tile(layout):
    for ranges in layout_ranges(layout, 24, 3):
        pieces = cut_pieces(ranges)
        assert plan_tiles(pieces, pieces, Mask()) == (Tile(0, 8, 0, 8, -8, 0),)


@pytest.mark.parametrize("layout", ["zigzag", "document_zigzag", "striped"])
def test_own_documents_are_square_causal_tiles(layout):
    """However many pieces a document is in here: local order is the global order."""
    documents = (0, 8, 9, 24)
    for ranges in layout_ranges(layout, 24, 2, documents):
        pieces = cut_pieces(ranges, documents)
        present = {piece.document for piece in pieces}
        tiles = plan_tiles(pieces, pieces, Mask())
        assert len(tiles) == len(present)
        assert all(tile[:2] == tile[2:4] and tile.hi == 0 for tile in tiles)


def test_zigzag_tiles_are_single_rectangles():
    early, late = (cut_pieces(ranges) for ranges in layout_ranges("zigzag", 32, 4)[1:3])
    assert plan_tiles(late, early, Mask()) == (Tile(0, 8, 0, 4, -8, 3),)  # all queries see the early chunk
    assert plan_tiles(early, late, Mask()) == (Tile(4, 8, 0, 8, -4, 7),)  # late queries see both chunks


def test_a_window_cuts_keys_that_are_too_old():
    first, second = (cut_pieces((range(start, start + 8),)) for start in (0, 8))
    assert plan_tiles(second, first, Mask(window=3)) == (Tile(0, 8, 0, 8, 5, 7),)  # the last two keys, two queries
    assert plan_tiles(second, first, Mask(window=1)) == ()
    assert plan_tiles(first, second, Mask(window=3)) == ()


def test_documents_do_not_meet():
    one, other = cut_pieces((range(0, 4),), (0, 4, 8)), cut_pieces((range(4, 8),), (0, 4, 8))
    assert plan_tiles(other, one, Mask()) == plan_tiles(other, one, Mask(causal=False)) == ()


def test_one_batch_has_one_layout():
    with pytest.raises(ValueError, match="one layout"):
        band(range(0, 8, 2), range(0, 8), Mask())


def test_mask_refuses_nonsense():
    with pytest.raises(ValueError, match="window=0"):
        Mask(window=0)
    with pytest.raises(ValueError, match="causal"):
        Mask(causal=False, window=3)
