"""What a step costs in bytes and seconds, as far as it depends on what backward keeps. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lightning_longctx.memory.offloading.store import MOST_IN_FLIGHT
from lightning_longctx.memory.plans import BlockPlan, MemoryPlan
from lightning_longctx.memory.policy import is_kept

LOSS = "loss"
"""Name of the moment between the last block's forward and its backward."""


@dataclass(frozen=True)
class RegionCost:
    """One region of one block.

    Args:
        name: Of the region.
        seconds: That backward takes to run it again.
        num_bytes: That keeping its results takes.
    """

    name: str
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class BlockCost:
    """One block.

    Args:
        name: Of the block.
        seconds: That backward takes to run all of it again.
        num_bytes: That it takes to keep all that autograd needs, besides what goes into the block.
        regions: What of it can be kept alone.
    """

    name: str
    seconds: float
    num_bytes: int
    regions: tuple[RegionCost, ...]


@dataclass(frozen=True)
class Moment:
    """A stretch of the step.

    Args:
        name: What happens in it.
        peak_bytes: Most that was there beyond the memory before the step, while no block kept anything (``full``).
        held: Numbers of the blocks of which something is kept at that time, if they keep something; of several passes,
            several times.
        passing: Those whose offloaded results are on their way then, out or back, and still on the device.
    """

    name: str
    peak_bytes: int
    held: tuple[int, ...]
    passing: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepCosts:
    """What was measured of a step in which every block ran again in backward, and nothing else was kept.

    Args:
        seconds: Of the step.
        blocks: In the order in which plans name them.
        moments: Of the step.
        offload_bytes_per_second: How fast a tensor goes to host memory, or comes back; 0 if nothing may go there.
    """

    seconds: float
    blocks: tuple[BlockCost, ...]
    moments: tuple[Moment, ...]
    offload_bytes_per_second: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What a step would cost under a plan.

    Args:
        seconds: Of the step.
        peak_bytes: Beyond the memory before the step.
        moment: When.
    """

    seconds: float
    peak_bytes: int
    moment: str


def kept_bytes(cost: BlockCost, plan: BlockPlan) -> int:
    """What a block keeps on the device, besides what goes into it."""
    if not plan.checkpointed:
        return cost.num_bytes
    return sum(region.num_bytes for region in cost.regions if region.name in plan.keep - plan.offload)


def offloaded_bytes(cost: BlockCost, plan: BlockPlan) -> int:
    """What a block keeps in host memory."""
    return sum(region.num_bytes for region in cost.regions if region.name in plan.offload)


def in_flight_bytes(costs: StepCosts, offload: Collection[str]) -> int:
    """What may be on its way to host memory at any time: a store lets go of its last tensors late."""
    sizes = [region.num_bytes for block in costs.blocks for region in block.regions if is_kept(region.name, offload)]
    return MOST_IN_FLIGHT * max(sizes, default=0)


def again_seconds(cost: BlockCost, plan: BlockPlan, offload_bytes_per_second: float = 0.0) -> float:
    """What backward takes to have again what the block has not kept on the device.

    Offloading counts as if nothing ran at the same time, there and back.
    """
    if not plan.checkpointed:
        return 0.0
    again = cost.seconds - sum(region.seconds for region in cost.regions if region.name in plan.keep)
    away = offloaded_bytes(cost, plan)
    return again + (2 * away / offload_bytes_per_second if away else 0.0)


def predict(costs: StepCosts, plan: MemoryPlan) -> Prediction:
    """What a step would cost under a plan whose regions are those of the costs."""
    pairs = list(zip(costs.blocks, plan.blocks, strict=True))
    kept = [kept_bytes(cost, block) for cost, block in pairs]
    away = [offloaded_bytes(cost, block) for cost, block in pairs]
    speed = costs.offload_bytes_per_second
    saved = sum(cost.seconds - again_seconds(cost, block, speed) for cost, block in pairs)
    peaks = [
        moment.peak_bytes + sum(kept[block] for block in moment.held) + sum(away[block] for block in moment.passing)
        for moment in costs.moments
    ]
    peak = max(peaks) + in_flight_bytes(costs, {name for block in plan.blocks for name in block.offload})
    name = costs.moments[peaks.index(max(peaks))].name
    return Prediction(costs.seconds - saved, peak, name)


def agreed(costs: Sequence[StepCosts]) -> StepCosts:
    """The dearest rank's numbers, one by one: ranks wait for each other, and the plan must fit all of them.

    Args:
        costs: Of every rank.

    Raises:
        ValueError: Ranks ran unlike blocks.
    """
    first = costs[0]
    for rank, other in enumerate(costs):
        if _structure(other) != _structure(first):
            raise ValueError(
                f"checkpointing.policy=auto: rank {rank} ran its blocks in another way than rank 0, so that no plan "
                "fits both. Use policy=selective."
            )
    blocks = tuple(
        BlockCost(one[0].name, max(b.seconds for b in one), max(b.num_bytes for b in one), _agreed_regions(one))
        for one in zip(*(rank.blocks for rank in costs), strict=True)
    )
    moments = tuple(
        replace(one[0], peak_bytes=max(moment.peak_bytes for moment in one))
        for one in zip(*(rank.moments for rank in costs), strict=True)
    )
    speed = min(rank.offload_bytes_per_second for rank in costs)
    return StepCosts(max(rank.seconds for rank in costs), blocks, moments, speed)


def _agreed_regions(blocks: Sequence[BlockCost]) -> tuple[RegionCost, ...]:
    regions = zip(*(block.regions for block in blocks), strict=True)
    return tuple(RegionCost(r[0].name, max(x.seconds for x in r), max(x.num_bytes for x in r)) for r in regions)


def _structure(costs: StepCosts) -> object:
    blocks = [(block.name, [region.name for region in block.regions]) for block in costs.blocks]
    return blocks, [(moment.name, moment.held, moment.passing) for moment in costs.moments]
