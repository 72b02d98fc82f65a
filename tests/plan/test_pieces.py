"""Pieces of a shard, and what is left of them when only parts are sent."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.plan.pieces import Piece, by_document, cut_pieces, select
from lightning_longctx.sequence.layout import LAYOUTS, layout_ranges
from tests.plan.pairs import PACKED, held


def test_documents_cut_a_range():
    assert cut_pieces((range(2, 5), range(9, 12)), (0, 3, 4, 10, 12)) == (
        Piece(range(2, 3), 0, 0),
        Piece(range(3, 4), 1, 1),
        Piece(range(4, 5), 2, 2),
        Piece(range(9, 10), 3, 2),
        Piece(range(10, 12), 4, 3),
    )
    assert cut_pieces((range(1, 12, 3),), (0, 6, 7, 12)) == (
        Piece(range(1, 7, 3), 0, 0),
        Piece(range(7, 13, 3), 2, 2),
    )


def test_without_documents_ranges_are_pieces():
    assert cut_pieces((range(2, 5), range(9, 12))) == (Piece(range(2, 5), 0, 0), Piece(range(9, 12), 3, 0))
    assert cut_pieces(()) == ()


@given(PACKED, st.integers(1, 5), st.sampled_from(LAYOUTS))
def test_pieces_hold_what_the_shard_holds(packed, num_ranks, layout):
    length, documents = packed
    for ranges in layout_ranges(layout, length, num_ranks, documents):
        pieces = cut_pieces(ranges, documents)
        positions = [position for whole in ranges for position in whole]
        assert [position for position, _ in held(pieces)] == positions
        assert all(first.stop == second.start for first, second in pairwise(pieces))
        for position, document in held(pieces) if documents else ():
            assert documents[document] <= position < documents[document + 1]
        found = by_document(pieces)
        assert found == {number: [piece for piece in pieces if piece.document == number] for number in found}
        assert sum(map(len, found.values())) == len(pieces)


@given(PACKED, st.integers(1, 5), st.sampled_from(LAYOUTS), st.data())
def test_selected_pieces_hold_the_selected_tokens(packed, num_ranks, layout, data):
    length, documents = packed
    ranges = data.draw(st.sampled_from(layout_ranges(layout, length, num_ranks, documents)))
    pieces = cut_pieces(ranges, documents)
    tokens = held(pieces)
    edges = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=8)))
    intervals = list(zip(edges[::2], edges[1::2], strict=False))
    selected = select(pieces, intervals)
    assert held(selected) == [tokens[i] for start, stop in intervals for i in range(start, stop)]
    assert all(first.stop == second.start for first, second in pairwise(selected))


def test_neighbours_that_are_selected_stay_one_piece():
    pieces = cut_pieces((range(0, 8),))
    assert select(pieces, [(1, 3), (3, 6)]) == (Piece(range(1, 6), 0, 0),)
    assert select(pieces, [(1, 3), (4, 6)]) == (Piece(range(1, 3), 0, 0), Piece(range(4, 6), 2, 0))
