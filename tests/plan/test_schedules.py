"""Schedules on known meshes: hand-checked messages and counted bytes."""

import pytest

from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.counts import sent_bytes
from lightning_longctx.plan.schedules import Hop

MEGABYTE = 1e6
TOKEN_BYTES = 2 * 8 * 64 * 4  # keys and values, 8 heads of 64, float32


def megabytes(layout, num_ranks, inner, length=4096):
    plans = [plan_attention(length, layout, num_ranks, inner, rank) for rank in range(num_ranks)]
    return [
        sent_bytes(
            (*plan.forward.sent, *plan.backward.sent),
            plan.shards,
            inner,
            key_bytes=TOKEN_BYTES,
            gradient_bytes=TOKEN_BYTES,
        )
        for plan in plans
    ]


def test_two_ranks_by_hand():
    """Rank 0's late chunk sees all of rank 1; rank 1 sees rank 0's early chunk only."""
    first, second = (plan_attention(8, "zigzag", 2, 2, rank) for rank in range(2))
    assert first.forward.sent == (Hop("kv_inner", 0, 1, 0, (0,)),)
    assert second.forward.sent == (Hop("kv_inner", 1, 0, 1, (0, 1)),)
    assert first.backward.sent == (Hop("kv_inner", 0, 1, 0, (0,)), Hop("grad_home", 0, 1, 1, (0, 1)))
    assert second.backward.sent == (Hop("kv_inner", 1, 0, 1, (0, 1)), Hop("grad_home", 1, 0, 0, (0,)))


def test_contiguous_chains_run_towards_later_ranks_and_end_there():
    for rank in range(4):
        plan = plan_attention(16, "contiguous", 4, 4, rank)
        assert {hop.target for hop in plan.forward.sent} == ({rank + 1} if rank < 3 else set())


def test_outer_block_is_passed_on_before_the_window_is_worked_on():
    """In the slot in which an outer block arrives its next outer hop is posted, to travel behind a whole inner ring."""
    plan = plan_attention(64, "striped", 8, 2, 0)
    arrivals = [step for step in plan.forward.steps if step.arrival and step.arrival.channel == "kv_outer"]
    assert len(arrivals) == 3
    for step in arrivals[:-1]:
        assert [hop.home for hop in step.sends if hop.channel == "kv_outer"] == [step.home]


@pytest.mark.parametrize(
    ("layout", "num_ranks", "inner", "mean", "outer_max"),
    [
        ("zigzag", 2, 2, 18.9, 0.0),  # a zigzag ring without need-awareness sends 33.6
        ("zigzag", 8, 4, 33.0, 5.25),  # LoongTrain's double ring: 8.4 over a node's link
        ("zigzag", 8, 2, 33.0, 17.9),
        ("contiguous", 4, 4, 18.9, 0.0),
        ("striped", 8, 4, 44.1, 6.3),
    ],
)
def test_megabytes_per_rank(layout, num_ranks, inner, mean, outer_max):
    counts = megabytes(layout, num_ranks, inner)
    assert sum(sum(count.values()) for count in counts) / num_ranks / MEGABYTE == pytest.approx(mean, rel=0.01)
    assert max(count["outer"] for count in counts) / MEGABYTE == pytest.approx(outer_max, rel=0.01)
