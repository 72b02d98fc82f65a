"""Cuts of a tile for kernels: every pair once, and only shapes the kernels know."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.plan.cuts import (
    banded_blocks,
    causal_parts,
    halved,
    is_causal_square,
    is_late_square,
    late_halved,
    narrowed,
    window_parts,
)
from lightning_longctx.plan.tiles import Tile
from tests.plan.pairs import covered


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


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9), st.data())
def test_blocks_cover_the_band(num_queries, num_keys, most_rows, data):
    hi = data.draw(st.integers(1 - num_queries, num_keys - 1))
    lo = data.draw(st.integers(-num_queries, min(hi - 1, num_keys - 2)))
    tile = Tile(3, 3 + num_queries, 5, 5 + num_keys, lo, hi)
    blocks = banded_blocks(tile, most_rows)
    assert (covered(blocks, 40, 40) == covered([tile], 40, 40)).all()
    for block in blocks:
        pairs = covered([block], 40, 40)[block.q_start : block.q_stop, block.k_start : block.k_stop]
        assert block.num_queries <= most_rows
        assert pairs.any(1).all(), "a row without a key: kernels disagree about what that gives"
        assert pairs.any(0).all(), "a key that no query of the block sees is read for nothing"


def test_blocks_along_a_band_are_alike():
    """One mask serves all blocks between the ends."""
    blocks = banded_blocks(Tile(0, 640, 0, 640, -100, 0), 64)
    assert len(blocks) == 10
    assert len({(block.num_queries, block.num_keys, block.lo, block.hi) for block in blocks[2:]}) == 1


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9), st.data())
def test_parts_of_a_window_cover_it(num_queries, num_keys, most_rows, data):
    hi = data.draw(st.integers(1 - num_queries, num_keys - 1))
    lo = data.draw(st.integers(-num_queries, min(hi - 1, num_keys - 2)))
    tile = Tile(3, 3 + num_queries, 5, 5 + num_keys, lo, hi)
    parts = window_parts(tile, most_rows)
    assert (covered(parts, 40, 40) == covered([tile], 40, 40)).all()
    for part in parts:
        pairs = covered([part], 40, 40)[part.q_start : part.q_stop, part.k_start : part.k_stop]
        assert pairs.any(1).all(), "a row without a key: kernels disagree about what that gives"
        if hi - lo >= 2 * most_rows:
            assert part.is_full or is_causal_square(part) or is_late_square(part) or part.num_queries == 1


@given(st.integers(1, 40), st.integers(1, 9))
def test_halves_cover_the_late_square(size, leaf):
    square = Tile(2, 2 + size, 3, 3 + size, -1, size - 1)
    leaves = late_halved(square, leaf)
    assert all(part.is_full or part.num_queries == part.num_keys <= leaf for part in leaves)
    assert (covered(leaves, 50, 50) == covered([square], 50, 50)).all()


def test_causal_parts_refuse_a_window():
    with pytest.raises(ValueError, match="window"):
        causal_parts(Tile(0, 4, 0, 4, -2, 0))
