"""The clock agrees with the counts, and with what must hold of any clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.communication import SCHEDULES, Communication
from lightning_longctx.plan.counts import sent_bytes
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.plan.simulate import estimate_attention
from lightning_longctx.plan.tiles import Tile
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.topology.links import Links

SHAPE = AttentionShape(heads=8, kv_heads=2, width=64, item_size=4)
SLOW = Links(inner_gbits=10, outer_gbits=0.1, teraflops=0.02, latency_us=100)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(-14, 14), st.integers(-14, 14))
def test_pairs_in_closed_form(num_queries, num_keys, lo, hi):
    tile = Tile(3, 3 + num_queries, 5, 5 + num_keys, min(lo, hi), max(lo, hi))
    rows = (min(i + tile.hi, num_keys - 1) - max(i + tile.lo + 1, 0) + 1 for i in range(num_queries))
    assert tile.num_pairs == sum(max(0, row) for row in rows)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("mask", [CAUSAL, Mask(window=100)])
def test_bytes_are_those_of_the_plan(schedule, keep_kv, mask):
    record, ways = SequenceRecord(1024, "zigzag", 8, 4), Communication(schedule, keep_kv)
    plans = [plan_attention(replace(record, rank=rank), mask, ways) for rank in range(8)]
    sizes = {"key_bytes": SHAPE.key_bytes, "gradient_bytes": SHAPE.gradient_bytes}
    sent = [
        sent_bytes((*plan.forward.sent, *plan.backward.sent), plan.ring.parcels, 4, **sizes).total() for plan in plans
    ]
    estimate = estimate_attention(record, SHAPE, mask, ways)
    assert estimate.mean_bytes == sum(sent) // 8
    assert estimate.schedule == schedule


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nobody_is_done_before_the_work_and_the_transfers_are(schedule):
    record = SequenceRecord(1024, "zigzag", 8, 4)
    estimates = [
        estimate_attention(record, SHAPE, CAUSAL, Communication(schedule, links=replace(SLOW, outer_gbits=gbits)))
        for gbits in (10, 0.1, 0.01)
    ]
    assert estimates[0].seconds <= estimates[1].seconds < estimates[2].seconds
    for estimate, gbits in zip(estimates, (10, 0.1, 0.01), strict=True):
        assert estimate.seconds >= max(estimate.compute_seconds, estimate.outer_bytes * 8e-9 / gbits)


def test_one_rank_computes_and_sends_nothing():
    estimate = estimate_attention(SequenceRecord(1000), SHAPE, CAUSAL, Communication(links=SLOW))
    work = 14 * 8 * 64 * 1000 * 1001 / 2 / 0.02e12
    assert estimate.seconds == pytest.approx(work)
    assert (estimate.schedule, estimate.mean_bytes, estimate.outer_bytes) == ("", 0, 0)


def test_heads_are_exchanged_over_the_links_that_join_them():
    record = SequenceRecord(4096, head=8)
    shape = AttentionShape(heads=8, kv_heads=8, width=64, item_size=4)
    inside, across = (
        estimate_attention(record, shape, CAUSAL, Communication(links=SLOW), heads_per_node)
        for heads_per_node in (8, 4)
    )
    # q, k, v in and out back, of 512 tokens and all heads; what stays on the rank is an eighth. Twice for backward.
    assert inside.mean_bytes == across.mean_bytes == 2 * 512 * 32 * 64 * 4 * 7 // 8
    assert (inside.outer_bytes, across.outer_bytes) == (0, 2 * 512 * 32 * 64 * 4 // 2)
    assert across.seconds > inside.seconds


def test_too_few_key_value_heads_are_replicated():
    few = estimate_attention(SequenceRecord(4096, head=8), AttentionShape(8, 2, 64, 4), CAUSAL)
    many = estimate_attention(SequenceRecord(4096, head=8), AttentionShape(8, 8, 64, 4), CAUSAL)
    assert few.mean_bytes == many.mean_bytes
