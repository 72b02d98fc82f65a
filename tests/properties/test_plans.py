"""Any plan covers each allowed (query, key) pair exactly once, brings every gradient home, and counts its bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_longctx.plan.choose import AttentionPlan, plan_attention
from lightning_longctx.plan.counts import hop_tokens
from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.needs import wanted_pieces
from lightning_longctx.plan.schedules import DoubleRing
from lightning_longctx.sequence.layout import LAYOUTS, layout_ranges

RINGS = st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 3), (4, 4), (4, 2), (6, 3), (8, 8), (8, 4), (8, 2), (16, 4)])
MASKS = st.one_of(
    st.just(Mask()), st.just(Mask()), st.just(Mask(causal=False)), st.integers(1, 40).map(lambda w: Mask(window=w))
)


@st.composite
def plans(draw):
    num_ranks, inner = draw(RINGS)
    layout, mask = draw(st.sampled_from(LAYOUTS)), draw(MASKS)
    shards = layout_ranges(layout, draw(st.integers(0, 70)), num_ranks)
    needs, most = wanted_pieces(shards, mask), max(map(len, shards))
    ring = DoubleRing(num_ranks // inner, inner, needs, most, draw(st.sampled_from([-1, 1])))
    return [AttentionPlan(rank, shards, mask, ring) for rank in range(num_ranks)]


def positions(ranges):
    return [position for piece in ranges for position in piece]


@given(plans(), st.booleans())
def test_every_allowed_pair_is_covered_once_and_nothing_else(plans, backward):
    length = sum(len(piece) for shard in plans[0].shards for piece in shard)
    count = np.zeros((length, length), dtype=int)
    for plan in plans:
        queries = np.array(positions(plan.shards[plan.rank]), dtype=int)
        for step in (plan.backward if backward else plan.forward).steps:
            keys = np.array(positions(plan.shards[step.home][piece] for piece in step.pieces), dtype=int)
            for tile in plan.tiles(step):
                offset = np.arange(tile.num_keys) - np.arange(tile.num_queries)[:, None]
                rows, columns = queries[tile.q_start : tile.q_stop], keys[tile.k_start : tile.k_stop]
                count[np.ix_(rows, columns)] += (tile.lo < offset) & (offset <= tile.hi)
    expected = np.array([[plans[0].mask.allows(i, j) for j in range(length)] for i in range(length)], dtype=int)
    assert (count == expected.reshape(length, length)).all()


@given(plans())
def test_every_gradient_comes_home_once_through_every_contributor(plans):
    """Follow each piece's accumulator from rank to rank: it must collect all contributors and end at home."""
    for home, pieces in enumerate(plans[0].shards):
        for piece in range(len(pieces)):
            contributors = {
                plan.rank for plan in plans if plan.rank != home and piece in plan.ring.needs[plan.rank][home]
            }
            follow, seen = None, []
            steps = range(len(plans[0].backward.steps))
            for index in steps:
                for plan in plans:
                    step = plan.backward.steps[index]
                    if step.home != home or plan.rank == home or piece not in step.pieces:
                        continue
                    arrived = [hop for hop in step.accumulators if piece in hop.pieces]
                    assert arrived == ([follow] if follow else [])
                    (follow,) = (hop for hop in step.gradient_sends if piece in hop.pieces)
                    seen.append(plan.rank)
            assert sorted(seen) == sorted(contributors)
            at_home = [hop for hop in plans[home].backward.returns if piece in hop.pieces]
            assert at_home == ([follow] if contributors else [])
            assert not at_home or at_home[0].target == home


@given(plans(), st.booleans())
def test_both_ends_agree_and_nothing_empty_is_sent(plans, backward):
    schedules = [plan.backward if backward else plan.forward for plan in plans]
    sent = sorted(hop for schedule in schedules for hop in schedule.sent)
    received = sorted(hop for schedule in schedules for step in schedule.steps for hop in step.receives)
    assert sent == received
    assert all(hop.source != hop.target and hop_tokens(hop, plans[0].shards) > 0 for hop in sent)
    awaited = [hop for s in schedules for step in s.steps for hop in (step.arrival, *step.accumulators) if hop]
    assert sorted([*awaited, *(hop for s in schedules for hop in s.returns)]) == received


@given(plans())
def test_receives_are_posted_in_the_order_of_sends_on_every_link(plans):
    """Backends without tags match messages by order: per (channel, source, target) both ends must post alike."""
    for schedules in ([plan.forward for plan in plans], [plan.backward for plan in plans]):
        for source in schedules:
            for target in range(len(schedules)):
                ends = ([h for s in source.steps for h in (*s.sends, *s.gradient_sends)], [])
                sends = [hop for hop in ends[0] if hop.target == target]
                posts = [
                    hop
                    for step in schedules[target].steps
                    for hop in step.receives
                    if hop.source in {h.source for h in sends}
                ]
                for channel in {hop.channel for hop in sends}:
                    assert [h for h in sends if h.channel == channel] == [h for h in posts if h.channel == channel]


@settings(max_examples=30)
@given(st.sampled_from([(2, 2), (4, 4), (4, 2), (8, 4), (8, 2), (16, 4)]), st.integers(1, 8))
def test_zigzag_sends_at_most_three_blocks_per_other_rank(ring, factor):
    """At most 3(Mw - 1) blocks per rank, forward and backward together (LoongTrain: 3Mw + M - 2)."""
    num_ranks, inner = ring
    length = 2 * num_ranks * factor
    for rank in range(num_ranks):
        plan = plan_attention(length, "zigzag", num_ranks, inner, rank)
        tokens = sum(hop_tokens(hop, plan.shards) for hop in (*plan.forward.sent, *plan.backward.sent))
        assert tokens <= 3 * (num_ranks - 1) * length // num_ranks
