"""The solver against brute force, and what is said where nothing fits."""

from __future__ import annotations

from itertools import chain, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_longctx.memory.choice.costs import BlockCost, Moment, RegionCost, StepCosts, agreed, predict
from lightning_longctx.memory.choice.solve import solve
from lightning_longctx.memory.choice.table import fixed_plans, plan_table
from lightning_longctx.memory.plans import BlockPlan, MemoryPlan

NAMES = ("attention", "mlp.up")
SPEED = 1000.0


@st.composite
def costs(draw):
    """Up to three blocks of two regions, held until their own backward, as in a stack of layers."""
    num_blocks = draw(st.integers(1, 3))
    blocks = []
    for index in range(num_blocks):
        sizes = draw(st.lists(st.integers(1, 40), min_size=len(NAMES), max_size=len(NAMES)))
        seconds = draw(st.lists(st.integers(1, 30), min_size=len(NAMES), max_size=len(NAMES)))
        regions = tuple(map(RegionCost, NAMES, map(float, seconds), sizes))
        own_seconds, own_bytes = draw(st.integers(0, 20)), draw(st.integers(0, 60))
        blocks.append(BlockCost(f"blocks.{index}", float(sum(seconds) + own_seconds), sum(sizes) + own_bytes, regions))
    peaks = draw(st.lists(st.integers(1, 100), min_size=2 * num_blocks + 1, max_size=2 * num_blocks + 1))
    helds = [tuple(range(index)) for index in [*range(num_blocks), num_blocks, *reversed(range(num_blocks))]]
    passing = draw(st.lists(st.sets(st.integers(0, num_blocks - 1)), min_size=len(peaks), max_size=len(peaks)))
    moments = tuple(
        Moment(f"moment {index}", peak, held, tuple(on_their_way))
        for index, (peak, held, on_their_way) in enumerate(zip(peaks, helds, passing, strict=True))
    )
    return StepCosts(1000.0, tuple(blocks), moments, SPEED)


def all_block_plans(may_offload):
    yield BlockPlan()
    for kept in chain.from_iterable(combinations(NAMES, size) for size in range(len(NAMES) + 1)):
        ways = [((name, False), (name, True)) if name in may_offload else ((name, False),) for name in kept]
        for way in product(*ways):
            yield BlockPlan(True, frozenset(kept), frozenset(name for name, away in way if away))


def brute_force(costs, budget, may_offload):
    """Least seconds of all plans that fit; None if none does."""
    options = list(all_block_plans(may_offload))
    predictions = (predict(costs, MemoryPlan("", plans)) for plans in product(options, repeat=len(costs.blocks)))
    return min((found.seconds for found in predictions if found.peak_bytes <= budget), default=None)


@settings(max_examples=60, deadline=None)
@given(costs=costs(), share=st.floats(-0.1, 1.1), may_offload=st.sampled_from([(), ("attention",), NAMES]))
def test_as_fast_as_the_best_of_all_plans(costs, share, may_offload):
    plans = fixed_plans(costs)
    least, most = (predict(costs, plans[name]).peak_bytes for name in ("full", "none"))
    budget = int(least + share * (most - least))
    best = brute_force(costs, budget, may_offload)
    if best is None:
        with pytest.raises(ValueError, match="is too little"):
            solve(costs, budget, may_offload)
        return
    found = predict(costs, solve(costs, budget, may_offload))
    assert found.peak_bytes <= budget
    assert found.seconds == pytest.approx(best)


def alike(num_blocks, budget_share):
    regions = tuple(RegionCost(f"part.{index}", 0.1 + 0.03 * index, 40 + 17 * index) for index in range(8))
    blocks = tuple(BlockCost(f"blocks.{index}", 2.5, 1500, regions) for index in range(num_blocks))
    helds = [tuple(range(index)) for index in [*range(num_blocks), num_blocks, *reversed(range(num_blocks))]]
    costs = StepCosts(1000.0, blocks, tuple(Moment("", 5000, held) for held in helds))
    return costs, int(5000 + budget_share * 1500 * num_blocks)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_hundred_layers(share):
    """As good as filling up greedily by seconds a byte, at least, and it ends."""
    costs, budget = alike(100, share)
    found = predict(costs, solve(costs, budget))
    room, greedy = budget - 5000, 0.0
    for seconds, size in sorted(
        ((r.seconds, r.num_bytes) for b in costs.blocks for r in b.regions), key=lambda x: -x[0] / x[1]
    ):
        if size <= room:
            room, greedy = room - size, greedy + seconds
    assert found.peak_bytes <= budget
    assert costs.seconds - found.seconds >= greedy * 0.99


def test_what_does_not_fit_says_what_would():
    gib = 2**30
    costs = StepCosts(1.0, (BlockCost("blocks.0", 0.5, 5, ()),), (Moment("backward of blocks.0", 3 * gib, ()),))
    with pytest.raises(
        ValueError,
        match=r"budget_gib=2 is too little.* takes 3 GiB, 1 GiB more, in backward of blocks.0. Set budget_gib=3.06",
    ):
        solve(costs, 2 * gib)


def test_slow_offloading_is_left_alone():
    regions = (RegionCost("attention", 1.0, 1000),)
    blocks = tuple(BlockCost(f"blocks.{index}", 2.0, 5000, regions) for index in range(4))
    for speed, away in ((1000.0, 0), (1e5, 4)):
        costs = StepCosts(9.0, blocks, (Moment("", 10, (0, 1, 2, 3)),), speed)
        plan = solve(costs, 2010, ("attention",))
        assert sum(bool(block.offload) for block in plan.blocks) == away
        assert sum(bool(block.keep) for block in plan.blocks) == (away or 2)


def test_ranks_agree_on_the_dearest():
    def rank(seconds, size, speed, name="a"):
        region = RegionCost(name, seconds / 2, size // 2)
        block = BlockCost("blocks.0", seconds, size, (region,))
        return StepCosts(10 * seconds, (block,), (Moment("loss", 3 * size, (0,)),), speed)

    assert agreed([rank(1.0, 10, 5.0), rank(0.5, 20, 3.0)]) == StepCosts(
        10.0, (BlockCost("blocks.0", 1.0, 20, (RegionCost("a", 0.5, 10),)),), (Moment("loss", 60, (0,)),), 3.0
    )
    with pytest.raises(ValueError, match="rank 1 ran its blocks in another way"):
        agreed([rank(1.0, 10, 5.0), rank(1.0, 10, 5.0, "b")])


def test_the_table_names_blocks_that_are_treated_alike_once():
    costs, budget = alike(6, 0.5)
    plan = MemoryPlan("auto", (BlockPlan(),) * 2 + (BlockPlan(True, frozenset(["part.1"])),) * 4)
    table = plan_table(costs, plan, budget)
    assert "| blocks.0 to blocks.1 | everything |" in table and "| blocks.2 to blocks.5 | part.1 |" in table
    assert [line.split("|")[1].strip() for line in table.splitlines()[-6:-2]] == ["auto", "none", "selective", "full"]
