"""The fastest memory plan that fits a budget, as a mixed-integer program."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from lightning_longctx.memory.choice.costs import LOSS, BlockCost, RegionCost, StepCosts, in_flight_bytes, predict
from lightning_longctx.memory.plans import BlockPlan, MemoryPlan, fixed_plan
from lightning_longctx.memory.policy import GIB, Checkpointing, is_kept

WORTHWHILE = 0.002
"""Regions that take a smaller share of their block's time are not worth a choice."""

_MOST_EXACT, _GAP, _MOST_SECONDS = 300, 1e-3, 20.0
"""Up to so many choices the answer is exact; beyond, it may be slower by this share of what is saved."""


class _Choice(NamedTuple):
    """One thing that may be done with a block: keep all of it, or keep or offload a region."""

    block: int
    region: str | None
    away: bool
    seconds: float
    num_bytes: int


def solve(costs: StepCosts, budget_bytes: int, may_offload: Collection[str] = ()) -> MemoryPlan:
    """The plan with the least step time of those that fit.

    Every block either keeps all, or runs again but for the regions that it keeps, here or in host memory.

    Args:
        costs: Measured under ``full``.
        budget_bytes: Most that a step may take beyond what is there before it.
        may_offload: Regions that may wait in host memory.

    Raises:
        ValueError: Nothing fits; the message says what would.
    """
    least = max(moment.peak_bytes for moment in costs.moments)
    if least > budget_bytes:
        raise ValueError(_does_not_fit(costs, budget_bytes))
    plans = [_solved(costs, budget_bytes, _choices(costs, ()))]
    for small in _offload_sets(costs, may_offload):
        room_in_flight = in_flight_bytes(costs, small)
        if least + room_in_flight <= budget_bytes:
            plans.append(_solved(costs, budget_bytes - room_in_flight, _choices(costs, small)))
    return min(plans, key=lambda plan: predict(costs, plan).seconds)


def _offload_sets(costs: StepCosts, may_offload: Collection[str]) -> list[set[str]]:
    """The regions that may be offloaded, then without the largest, and so on: what is in flight goes by the largest."""
    sizes: dict[str, int] = {}
    for region in (region for block in costs.blocks for region in block.regions if is_kept(region.name, may_offload)):
        sizes[region.name] = max(sizes.get(region.name, 0), region.num_bytes)
    return [{name for name, size in sizes.items() if size <= most} for most in set(sizes.values()) if most]


def _solved(costs: StepCosts, budget_bytes: int, choices: list[_Choice]) -> MemoryPlan:
    gains = np.array([choice.seconds for choice in choices])
    exclusive = _exclusive(choices)
    there = [[moment.passing if choice.away else moment.held for choice in choices] for moment in costs.moments]
    held = np.array([[c.num_bytes * t.count(c.block) for c, t in zip(choices, row, strict=True)] for row in there])
    room = np.array([budget_bytes - moment.peak_bytes for moment in costs.moments], dtype=float)
    unit = max(budget_bytes, 1)
    limits = LinearConstraint(
        np.concatenate([held / unit, exclusive]),
        ub=cast("Any", np.concatenate([room / unit, np.ones(len(exclusive))])),
    )
    options = {"mip_rel_gap": 0.0 if len(choices) <= _MOST_EXACT else _GAP, "time_limit": _MOST_SECONDS}
    found = milp(-gains, integrality=np.ones(len(choices)), bounds=Bounds(0, 1), constraints=limits, options=options)
    if found.x is None:
        raise RuntimeError(f"HiGHS found no memory plan in {_MOST_SECONDS:.0f} s: {found.message}")
    chosen = [choice for choice, value in zip(choices, found.x, strict=True) if value > 0.5]
    return MemoryPlan("auto", tuple(_plan_of(index, chosen) for index in range(len(costs.blocks))))


def _choices(costs: StepCosts, may_offload: Collection[str]) -> list[_Choice]:
    found = []
    speed = costs.offload_bytes_per_second
    for index, block in enumerate(costs.blocks):
        if block.seconds == 0:  # it has no backward, as where it is frozen, and holds nothing
            continue
        found.append(_Choice(index, None, False, block.seconds, block.num_bytes))
        for region in _worthwhile(block):
            found.append(_Choice(index, region.name, False, region.seconds, region.num_bytes))
            moving = 2 * region.num_bytes / speed if speed else float("inf")
            if is_kept(region.name, may_offload) and moving < region.seconds:
                found.append(_Choice(index, region.name, True, region.seconds - moving, region.num_bytes))
    return found


def _worthwhile(block: BlockCost) -> list[RegionCost]:
    return [region for region in block.regions if region.seconds > WORTHWHILE * block.seconds]


def _exclusive(choices: list[_Choice]) -> np.ndarray:
    """One row for every region of every block, of which at most one may be chosen: all, the region here, or away."""
    regions = dict.fromkeys((choice.block, choice.region) for choice in choices if choice.region is not None)
    rows = [[c.block == block and c.region in (None, region) for c in choices] for block, region in regions]
    return np.array(rows, dtype=float).reshape(-1, len(choices))


def _plan_of(index: int, chosen: list[_Choice]) -> BlockPlan:
    own = [choice for choice in chosen if choice.block == index]
    if any(choice.region is None for choice in own):
        return BlockPlan()
    kept = frozenset(choice.region for choice in own if choice.region)
    return BlockPlan(True, kept, frozenset(choice.region for choice in own if choice.region and choice.away))


def _does_not_fit(costs: StepCosts, budget_bytes: int) -> str:
    least = predict(costs, fixed_plan(Checkpointing("full"), len(costs.blocks)))
    needed, more = least.peak_bytes / GIB, (least.peak_bytes - budget_bytes) / GIB
    advice = "compute the loss in tiles (linear_cross_entropy)" if least.moment == LOSS else "use checkpointing.tiles"
    return (
        f"checkpointing.budget_gib={budget_bytes / GIB:.3g} is too little: even if backward runs every block again "
        f"({costs.blocks[0].name} to {costs.blocks[-1].name}), a step takes {needed:.3g} GiB, {more:.2g} GiB more, in "
        f"{least.moment}. Set budget_gib={_up(needed)}, {advice}, give the sequence more ranks (degrees.context), or "
        "make it shorter."
    )


def _up(gib: float) -> float:
    return float(np.ceil(gib * 1.02 * 100) / 100)
