"""What a layout is chosen from is what the plan does, and the choices are those that one would make."""

from __future__ import annotations

import time
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_longctx.plan.layouts import choose_layout, explain_layouts, missing_tokens, visible_pairs
from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.parcels import plan_parcels
from lightning_longctx.plan.pieces import cut_pieces
from lightning_longctx.plan.tiles import plan_tiles
from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.layout import LAYOUTS, layout_ranges
from lightning_longctx.topology.links import Links

MASKS = (Mask(), Mask(causal=False), Mask(window=1), Mask(window=7), Mask(window=40))


def packed(lengths: list[int]) -> Documents:
    return tuple(accumulate(lengths, initial=0))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(LAYOUTS),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from(MASKS),
)
def test_counts_are_those_of_the_plan(layout, lengths, num_ranks, mask):
    documents = packed(lengths)
    shards = [cut_pieces(ranges, documents) for ranges in layout_ranges(layout, documents[-1], num_ranks, documents)]
    parcels = plan_parcels(tuple(shards), mask)
    for rank, pieces in enumerate(shards):
        tiles = [tile for home in shards for tile in plan_tiles(pieces, home, mask)]
        closed = sum(visible_pairs(p.positions, *documents[p.document : p.document + 2], mask) for p in pieces)
        assert closed == sum(tile.num_pairs for tile in tiles)
        wanted = sum(parcel.num_tokens for home in parcels for parcel in home if rank in parcel.wanted_by)
        missing = missing_tokens(pieces, mask, documents)
        if layout == "striped" and mask.window is not None:
            assert missing >= wanted, "the span of what is seen, where a window skips nothing"
        else:
            assert missing == wanted


@pytest.mark.parametrize("inner_ring", [8, 4])
def test_layouts_that_anybody_would_choose(inner_ring):
    length, ranks = 65536, 8
    assert choose_layout(length, ranks, inner_ring) == "zigzag"
    assert choose_layout(length, ranks, inner_ring, (0, length)) == "zigzag"
    assert choose_layout(length, ranks, inner_ring, masks=(Mask(window=1024),)) == "contiguous"
    assert choose_layout(length, ranks, inner_ring, masks=(Mask(window=1024), Mask())) == "zigzag"
    assert choose_layout(length, ranks, inner_ring, packed([1024] * 64)) == "balanced"
    two_rows = packed([1024] * 64 + [512] * 128)
    assert choose_layout(length, ranks, inner_ring, two_rows, num_rows=2) == "balanced"


def test_rows_that_are_one_document_each_are_not_packed():
    assert choose_layout(4096, 4, 4, (0, 4096, 8192), num_rows=2) == "zigzag"


def test_a_model_that_does_not_isolate_documents_sees_whole_rows():
    documents = packed([1024] * 64)
    rows = explain_layouts(65536, 8, 8, documents, masks=(Mask(isolate=False),))
    assert rows == explain_layouts(65536, 8, 8)


def test_documents_that_fit_need_nothing_of_other_ranks():
    row = next(row for row in explain_layouts(65536, 8, 4, packed([1024] * 64)) if row.is_chosen)
    assert (row.layout, row.imbalance, row.mean_bytes, row.outer_bytes) == ("balanced", 1.0, 0, 0)


def test_the_explanation_marks_what_is_chosen():
    for documents in ((), packed([30_000, 20_000, 10_000, 5_536]), packed([700] * 93 + [436])):
        for mask in (Mask(), Mask(window=2048)):
            rows = explain_layouts(65536, 8, 4, documents, masks=(mask,))
            assert [row.layout for row in rows if row.is_chosen] == [choose_layout(65536, 8, 4, documents, 1, (mask,))]


def test_slow_links_prefer_less_traffic_over_even_work():
    documents = packed([30_000, 20_000, 10_000, 5_536])
    by_name = {row.layout: row for row in explain_layouts(65536, 8, 1, documents)}
    assert by_name["document_zigzag"].imbalance < by_name["contiguous"].imbalance
    assert by_name["document_zigzag"].outer_bytes > by_name["contiguous"].outer_bytes
    slow = {row.layout: row for row in explain_layouts(65536, 8, 1, documents, links=Links(outer_gbits=0.01))}
    assert slow["contiguous"].seconds < slow["document_zigzag"].seconds


def test_many_documents_keep_a_collate_worker_no_longer_than_a_step():
    documents = packed([200 + index * 7919 % 1600 for index in range(10_000)])
    start = time.process_time()
    assert choose_layout(documents[-1], 64, 8, documents) == "balanced"
    assert time.process_time() - start < 3.0, "0.3 s on an idle machine"
