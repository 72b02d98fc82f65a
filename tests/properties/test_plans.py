"""Any plan covers each allowed (query, key) pair exactly once, brings every gradient home, and counts its bytes."""

from itertools import accumulate

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_longctx.plan.choose import AttentionPlan, plan_attention
from lightning_longctx.plan.communication import SCHEDULES, Communication
from lightning_longctx.plan.counts import hop_tokens
from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.parcels import divided, plan_parcels
from lightning_longctx.plan.pieces import cut_pieces
from lightning_longctx.plan.schedules import DoubleRing
from lightning_longctx.sequence.layout import LAYOUTS, layout_ranges
from lightning_longctx.sequence.record import SequenceRecord

RINGS = st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 3), (4, 4), (4, 2), (6, 3), (8, 8), (8, 4), (8, 2), (16, 4)])
MASKS = st.one_of(
    st.just(Mask()), st.just(Mask()), st.just(Mask(causal=False)), st.integers(1, 40).map(lambda w: Mask(window=w))
)


@st.composite
def packed(draw):
    """``(length of a row, rows, cumulative document lengths)``."""
    if draw(st.booleans()):
        return draw(st.integers(0, 70)), 1, ()
    lengths = draw(st.lists(st.sampled_from([1, 1, 2, 3, 8, 20, 33]), min_size=1, max_size=8))
    if draw(st.booleans()):
        return sum(lengths), 1, tuple(accumulate(lengths, initial=0))
    other = draw(st.permutations(lengths))
    return sum(lengths), 2, tuple(accumulate([*lengths, *other], initial=0))


@st.composite
def plans(draw):
    num_ranks, inner = draw(RINGS)
    layout, mask, (length, rows, documents) = draw(st.sampled_from(LAYOUTS)), draw(MASKS), draw(packed())
    ranges = layout_ranges(layout, length, num_ranks, documents, rows)
    shards = tuple(cut_pieces(held, documents) for held in ranges)
    parts = draw(st.sampled_from([1, 2, 4]))
    ring = DoubleRing(
        num_ranks // inner,
        inner,
        divided(plan_parcels(shards, mask), parts),
        draw(st.sampled_from([-1, 1])),
        draw(st.sampled_from(SCHEDULES)),
        draw(st.booleans()),
        parts,
    )
    return [AttentionPlan(rank, shards, mask, ring) for rank in range(num_ranks)]


def held(plan, rank):
    """``(position, document)`` of every token on a rank, in local order."""
    return [(position, piece.document) for piece in plan.shards[rank] for position in piece.positions]


def worked_on(plan, step):
    """The same for the keys of a step."""
    tokens = held(plan, step.home)
    if step.home == plan.rank:
        return tokens
    parcels = plan.ring.parcels[step.home]
    return [tokens[i] for p in step.parcels for start, stop in parcels[p].intervals for i in range(start, stop)]


@given(plans(), st.booleans())
def test_every_allowed_pair_is_covered_once_and_nothing_else(plans, backward):
    everything = sorted(token for rank in range(len(plans)) for token in held(plans[0], rank))
    assert [position for position, _ in everything] == list(range(len(everything)))
    count = np.zeros((len(everything), len(everything)), dtype=int)
    for plan in plans:
        queries = np.array([position for position, _ in held(plan, plan.rank)], dtype=int)
        for step in (plan.backward if backward else plan.forward).steps:
            if step.share == "last":
                continue  # the tiles of the first half's step, of which each does some
            keys = np.array([position for position, _ in worked_on(plan, step)], dtype=int)
            for tile in plan.tiles(step):
                offset = np.arange(tile.num_keys) - np.arange(tile.num_queries)[:, None]
                rows, columns = queries[tile.q_start : tile.q_stop], keys[tile.k_start : tile.k_stop]
                count[np.ix_(rows, columns)] += (tile.lo < offset) & (offset <= tile.hi)
    mask = plans[0].mask
    expected = [[mask.allows(i, j) and one == other for j, other in everything] for i, one in everything]
    assert (count == np.array(expected, dtype=int).reshape(count.shape)).all()


@given(plans())
def test_nothing_is_worked_on_or_carried_that_nobody_needs(plans):
    """Every token of a parcel is seen by some query of every rank that wants it."""
    for home, parcels in enumerate(plans[0].ring.parcels):
        keys = held(plans[0], home)
        for parcel in parcels:
            assert parcel.num_tokens == sum(stop - start for start, stop in parcel.intervals) > 0
            for rank in parcel.wanted_by:
                queries = held(plans[0], rank)
                for start, stop in parcel.intervals:
                    for key, document in keys[start:stop]:
                        assert any(plans[0].mask.allows(query, key) for query, other in queries if other == document)


@given(plans())
def test_every_gradient_comes_home_once_from_every_contributor(plans):
    """Follow the sums of every parcel from rank to rank: together they hold each contributor once, at home."""
    for home, parcels in enumerate(plans[0].ring.parcels):
        for p, parcel in enumerate(parcels):
            sums: dict[int, list[int]] = {}  # by holder: whose shares the sum on its way to it contains
            arrived: list[int] = []
            for index in range(len(plans[0].backward.steps)):
                moves = []
                for plan in plans:
                    step = plan.backward.steps[index]
                    mine = step.home == home and plan.rank != home and p in step.parcels
                    got = [hop for hop in step.accumulators if hop.home == home and p in hop.parcels]
                    sent = [hop for hop in step.gradient_sends if hop.home == home and p in hop.parcels]
                    assert len(got) <= 1 and len(sent) == int(mine)
                    if mine:
                        share = (sums.pop(plan.rank) if got else []) + [plan.rank]
                        moves.append((sent[0].target, share))
                for target, share in moves:
                    if target == home:
                        arrived += share
                    else:
                        assert target not in sums
                        sums[target] = share
            assert not sums and sorted(arrived) == sorted(parcel.wanted_by)
            assert all(hop.target == home for hop in plans[home].backward.returns)


@given(plans(), st.booleans())
def test_both_ends_agree_and_nothing_empty_is_sent(plans, backward):
    schedules = [plan.backward if backward else plan.forward for plan in plans]
    sent = sorted(hop for schedule in schedules for hop in schedule.sent)
    received = sorted(hop for schedule in schedules for step in schedule.steps for hop in step.receives)
    assert sent == received
    assert all(hop.source != hop.target and hop_tokens(hop, plans[0].ring.parcels) > 0 for hop in sent)
    steps = [step for schedule in schedules for step in schedule.steps]
    awaited = [hop for s in steps for hop in (None if s.is_kept else s.arrival, *s.accumulators) if hop]
    assert sorted([*awaited, *(hop for s in schedules for hop in s.returns)]) == received


@given(plans())
def test_what_is_kept_came_in_forward_and_is_not_sent_again(plans):
    for plan in plans:
        kept = plan.ring.kept(plan.rank)
        came = [step.arrival for step in plan.forward.steps if step.arrival and step.arrival.channel == "kv_outer"]
        assert sorted(kept) == (sorted(came) if plan.ring.keep_kv else [])
        assert sorted(step.arrival for step in plan.backward.steps if step.is_kept) == sorted(kept)
        assert not plan.ring.keep_kv or all(hop.channel != "kv_outer" for hop in plan.backward.sent)


@given(plans())
def test_a_step_sends_only_what_it_holds(plans):
    for plan in plans:
        for step in (*plan.forward.steps, *plan.backward.steps):
            for hop in step.sends:
                assert hop.home == plan.rank or (step.arrival and set(hop.parcels) <= set(step.arrival.parcels))
            assert step.home == plan.rank or not step.parcels or set(step.parcels) <= set(step.arrival.parcels)
            assert all(set(hop.parcels) <= set(step.parcels) for hop in (*step.accumulators, *step.gradient_sends))


@given(plans())
def test_receives_are_posted_in_the_order_of_sends_on_every_link(plans):
    """Backends without tags match messages by order: per (channel, source, target) both ends must post alike."""
    for schedules in ([plan.forward for plan in plans], [plan.backward for plan in plans]):
        for source in range(len(schedules)):
            sends = [h for s in schedules[source].steps for h in (*s.sends, *s.gradient_sends)]
            for target in range(len(schedules)):
                posts = [hop for step in schedules[target].steps for hop in step.receives if hop.source == source]
                for channel in {hop.channel for hop in posts}:
                    there = [hop for hop in sends if hop.target == target and hop.channel == channel]
                    assert there == [hop for hop in posts if hop.channel == channel]


@settings(max_examples=30)
@given(
    st.sampled_from([(2, 2), (4, 4), (4, 2), (8, 4), (8, 2), (16, 4)]), st.integers(1, 8), st.sampled_from(SCHEDULES)
)
def test_zigzag_sends_at_most_three_blocks_per_other_rank(ring, factor, schedule):
    """At most 3(Mw - 1) blocks per rank, forward and backward together (LoongTrain: 3Mw + M - 2)."""
    num_ranks, inner = ring
    length = 2 * num_ranks * factor
    for rank in range(num_ranks):
        record = SequenceRecord(length, "zigzag", num_ranks, inner, rank)
        plan = plan_attention(record, communication=Communication(schedule=schedule))
        tokens = sum(hop_tokens(hop, plan.ring.parcels) for hop in (*plan.forward.sent, *plan.backward.sent))
        assert tokens <= 3 * (num_ranks - 1) * length // num_ranks
