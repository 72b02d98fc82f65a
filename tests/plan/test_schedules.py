"""Schedules on known meshes: hand-checked messages and counted bytes."""

from collections import Counter

import pytest

from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.communication import SCHEDULES, Communication
from lightning_longctx.plan.counts import hop_tokens, sent_bytes
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.steps import Hop
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.topology.links import Links

MEGABYTE = 1e6
TOKEN_BYTES = 2 * 8 * 64 * 4  # keys and values, 8 heads of 64, float32


def plans_of(layout, num_ranks, inner, length=4096, mask=CAUSAL, documents=(), **options):
    communication = Communication(**options)
    records = [SequenceRecord(length, layout, num_ranks, inner, rank, documents=documents) for rank in range(num_ranks)]
    return [plan_attention(record, mask, communication) for record in records]


def messages(plan):
    return (*plan.forward.sent, *plan.backward.sent)


def megabytes(plans):
    """By rank and link, forward and backward."""
    return [
        Counter(
            {
                link: count / MEGABYTE
                for link, count in sent_bytes(
                    messages(plan),
                    plan.ring.parcels,
                    plan.ring.inner,
                    key_bytes=TOKEN_BYTES,
                    gradient_bytes=TOKEN_BYTES,
                ).items()
            }
        )
        for plan in plans
    ]


def outer(plans):
    return [count["outer"] for count in megabytes(plans)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_by_hand(schedule):
    """Rank 0's late chunk sees all of rank 1; rank 1 sees rank 0's early chunk only: one parcel each."""
    first, second = plans_of("zigzag", 2, 2, length=8, schedule=schedule)
    there, back = Hop("kv_inner", 0, 1, 0, (0,)), Hop("kv_inner", 1, 0, 1, (0,))
    assert first.forward.sent == (there,)
    assert second.forward.sent == (back,)
    assert first.backward.sent == (there, Hop("grad_home", 0, 1, 1, (0,)))
    assert second.backward.sent == (back, Hop("grad_home", 1, 0, 0, (0,)))
    assert [hop_tokens(hop, first.ring.parcels) for hop in (there, back)] == [2, 4]


def test_contiguous_chains_run_towards_later_ranks_and_end_there():
    """The last rank contributes last to every sum, and sends it straight home."""
    for rank, plan in enumerate(plans_of("contiguous", 4, 4, length=16, schedule="double_ring")):
        assert {hop.target for hop in plan.forward.sent} == ({rank + 1} if rank < 3 else set())
        home = [(hop.target, hop.home) for hop in plan.backward.sent if hop.channel == "grad_home"]
        assert sorted(home) == ([(0, 0), (1, 1), (2, 2)] if rank == 3 else [])


def test_outer_block_is_passed_on_before_the_window_is_worked_on():
    """In the slot in which an outer block arrives its next outer hop is posted, to travel behind a whole inner ring."""
    for plan in plans_of("striped", 8, 2, length=64, schedule="double_ring"):
        windows = set()
        for step in plan.forward.steps:
            if step.arrival and step.arrival.channel == "kv_outer":
                away = (plan.rank // 2 - step.home // 2) * plan.ring.direction % 4
                onwards = [hop.home for hop in step.sends if hop.channel == "kv_outer"]
                assert onwards == ([] if away == 3 else [step.home])
                windows.add(away)
        assert windows == {1, 2, 3}


@pytest.mark.parametrize(
    ("layout", "num_ranks", "inner", "mean", "outer_max"),
    [
        ("zigzag", 2, 2, 18.9, 0.0),  # a zigzag ring without need-awareness sends 33.6
        ("zigzag", 8, 4, 33.0, 5.25),  # LoongTrain's double ring: 8.4 over a node's link
        ("zigzag", 8, 2, 33.0, 15.7),
        ("zigzag", 4, 2, 28.3, 10.5),
        ("contiguous", 4, 4, 18.9, 0.0),
        ("striped", 8, 4, 44.1, 6.3),
    ],
)
def test_megabytes_per_rank(layout, num_ranks, inner, mean, outer_max):
    counts = megabytes(plans_of(layout, num_ranks, inner))
    assert sum(count.total() for count in counts) / num_ranks == pytest.approx(mean, rel=0.01)
    assert max(count["outer"] for count in counts) == pytest.approx(outer_max, rel=0.01)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_all_gather_sends_every_block_over_the_outer_link_once_for_each_rank(layout):
    """``direct`` and ``double_ring``: once for each node, here of 4 ranks."""
    whole = sum(outer(plans_of(layout, 8, 4, schedule="all_gather")))
    for schedule in ("direct", "double_ring"):
        assert sum(outer(plans_of(layout, 8, 4, schedule=schedule))) == pytest.approx(whole / 4, rel=0.01)


@pytest.mark.parametrize("schedule", ["direct", "double_ring"])
@pytest.mark.parametrize(("num_ranks", "inner"), [(4, 2), (8, 4)])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_kept_blocks_are_a_third_less_over_the_outer_link(layout, num_ranks, inner, schedule):
    """Keys forward, keys backward, gradients: the second is gone. Inside the rings nothing changes."""
    again, kept = (plans_of(layout, num_ranks, inner, schedule=schedule, keep_kv=keep) for keep in (False, True))
    assert sum(outer(kept)) == pytest.approx(sum(outer(again)) * 2 / 3, rel=0.01)
    inside = [sum(count["inner"] for count in megabytes(plans)) for plans in (kept, again)]
    assert inside[0] == pytest.approx(inside[1], rel=0.01)


@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES])
def test_a_window_on_contiguous_shards_stays_between_neighbours(schedule):
    """1,024 keys a query: the first query of a shard sees 1,023 of the shard before, the last of any."""
    for rank, plan in enumerate(plans_of("contiguous", 8, 8, 65536, Mask(window=1024), schedule=schedule)):
        sent = Counter((hop.channel, hop.target - rank, hop_tokens(hop, plan.ring.parcels)) for hop in messages(plan))
        keys, gradients = ("kv_inner", 1, 1023), ("grad_home", -1, 1023)
        assert sent == {**({keys: 2} if rank < 7 else {}), **({gradients: 1} if rank else {})}


@pytest.mark.parametrize("inner", [8, 4, 2, 1])
def test_a_window_on_contiguous_shards_crosses_to_the_next_node_once(inner):
    """Of a node's ranks only the last one's keys are seen on another node, by the first rank there."""
    for rank, plan in enumerate(plans_of("contiguous", 8, inner, 65536, Mask(window=1024), schedule="direct")):
        crossing = [hop for hop in plan.forward.sent if hop.channel == "kv_outer"]
        last = rank < 7 and rank // inner != (rank + 1) // inner
        assert sum(hop_tokens(hop, plan.ring.parcels) for hop in crossing) == (1023 if last else 0)
        assert all(hop.target // inner == rank // inner + 1 for hop in crossing)


@pytest.mark.parametrize("layout", ["contiguous", "balanced"])
@pytest.mark.parametrize("inner", [8, 4])
def test_documents_that_fit_on_ranks_need_no_message(layout, inner):
    documents = tuple(range(0, 65537, 1024))
    for mask in (Mask(), Mask(window=100), Mask(causal=False)):
        for plan in plans_of(layout, 8, inner, 65536, mask, documents):
            assert not messages(plan)


def test_auto_spares_the_slow_link():
    """Between nodes ``all_gather`` sends four times as much, inside them least."""
    slow_between = plans_of("zigzag", 8, 4, links=Links(inner_gbits=1000.0, outer_gbits=0.1))
    slow_inside = plans_of("zigzag", 8, 4, links=Links(inner_gbits=0.1, outer_gbits=1000.0))
    assert {plan.ring.route for plan in slow_inside} == {"all_gather"}
    assert {plan.ring.route for plan in slow_between} <= {"double_ring", "direct"}
