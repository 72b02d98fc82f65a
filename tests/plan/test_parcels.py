"""Who needs which keys, down to single tokens."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.parcels import Parcel, phases, plan_parcels
from lightning_longctx.plan.pieces import cut_pieces
from lightning_longctx.sequence.layout import LAYOUTS, layout_ranges
from tests.plan.pairs import MASKS, PACKED, held


def shards_of(layout, length, num_ranks, documents=()):
    return tuple(cut_pieces(ranges, documents) for ranges in layout_ranges(layout, length, num_ranks, documents))


@given(PACKED, st.integers(1, 5), st.sampled_from(LAYOUTS), MASKS)
def test_every_rank_gets_exactly_the_keys_that_it_sees(packed, num_ranks, layout, mask):
    length, documents = packed
    shards = shards_of(layout, length, num_ranks, documents)
    for home, parcels in enumerate(plan_parcels(shards, mask)):
        keys = held(shards[home])
        for rank, queries in enumerate(map(held, shards)):
            wanted = [parcel.intervals for parcel in parcels if rank in parcel.wanted_by]
            got = sorted(i for intervals in wanted for start, stop in intervals for i in range(start, stop))
            seen = [
                index
                for index, (key, document) in enumerate(keys)
                if rank != home and any(mask.allows(query, key) for query, other in queries if other == document)
            ]
            assert got == seen
        assert all(parcel.num_tokens == sum(b - a for a, b in parcel.intervals) for parcel in parcels)
        assert len({parcel.wanted_by for parcel in parcels}) == len(parcels), "one parcel for one set of ranks"


def test_zigzag_by_hand():
    """Rank 1 sees rank 0's early chunk; rank 0's late chunk sees all of rank 1."""
    first, second = plan_parcels(shards_of("zigzag", 8, 2), Mask())
    assert first == (Parcel(((0, 2),), frozenset({1}), 2),)
    assert second == (Parcel(((0, 4),), frozenset({0}), 4),)


def test_a_window_sends_its_edge_only():
    first, second, third = plan_parcels(shards_of("contiguous", 24, 3), Mask(window=4))
    assert first == (Parcel(((5, 8),), frozenset({1}), 3),)
    assert second == (Parcel(((5, 8),), frozenset({2}), 3),)
    assert third == ()


def test_only_the_document_that_is_cut_is_sent():
    first, second = plan_parcels(shards_of("contiguous", 16, 2, (0, 5, 11, 16)), Mask())
    assert first == (Parcel(((5, 8),), frozenset({1}), 3),)
    assert second == ()


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(1, 4))
def test_phases_ascend_without_gaps(sizes, most):
    parcels = tuple(Parcel(((0, size),), frozenset({1}), size) for size in sizes)
    found = phases(parcels, most)
    assert len(found) == len(sizes) and sorted(set(found)) == list(range(len(set(found))))
    assert list(found) == sorted(found) and len(set(found)) <= most
