"""``auto``: one step under ``full`` to warm up, one that is measured, then the plan that was solved for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_longctx._upstream import profiler_is_on
from lightning_longctx.memory.checkpointed import CheckpointedBlocks
from lightning_longctx.memory.choice.costs import StepCosts, agreed, predict
from lightning_longctx.memory.choice.live_bytes import PROFILED, LiveBytes, live_bytes
from lightning_longctx.memory.choice.measure import StepMeter
from lightning_longctx.memory.choice.solve import solve
from lightning_longctx.memory.choice.table import plan_table
from lightning_longctx.memory.offloading.offload import Store
from lightning_longctx.memory.plans import MemoryPlan
from lightning_longctx.memory.policy import GIB, Checkpointing, is_kept

_SPARE = 0.05
"""Share of a device that is left alone where no budget is given."""

Gather = Callable[[Any], list[Any]]
"""Objects of all ranks, on every rank; a collective."""


class AutoPlan:
    """Follows the first steps of a run, and changes what backward keeps after the second one.

    Args:
        blocks: Under ``full`` now.
        module: The whole one.
        device: That it runs on.
        gather: Asks all ranks.
        is_first: This is rank 0.
        report: Shown the table of the plan, as Markdown; called on every rank.
    """

    def __init__(
        self,
        blocks: CheckpointedBlocks,
        module: nn.Module,
        device: torch.device,
        gather: Gather,
        is_first: bool,
        report: Callable[[str], None],
    ) -> None:
        self._blocks, self._module, self._device = blocks, module, device
        self._gather, self._is_first, self._report = gather, is_first, report
        self._steps_begun = 0
        self._meter: StepMeter | None = None
        self._check: LiveBytes | None = None
        self.costs: StepCosts | None = None
        """What was measured, the dearest rank's; None before."""

    def before_step(self) -> None:
        """An optimizer step begins, before its first micro-batch."""
        self._steps_begun += 1
        if self._steps_begun in (2, 3) and any(self._gather(profiler_is_on())):
            raise ValueError(PROFILED)
        if self._steps_begun == 2:
            meter = StepMeter(self._blocks.blocks, self._module, self._device, self._blocks.options.tiles)
            meter.begin()
            self._meter = meter
        elif self._steps_begun == 3:
            check = live_bytes(self._device, self._module)
            check.start()
            self._check = check

    def before_backward(self) -> None:
        """A micro-batch has its loss, and the gradients of the step before are gone."""
        if self._check is not None:
            self._check.mark()

    def after_gradients(self, skipped: bool) -> None:
        """Its gradients are there. A collective after the second step and after the third.

        Args:
            skipped: The optimizer will not step, on any rank. Such a step does not count.
        """
        if self._meter is not None:
            meter, self._meter = self._meter, None
            costs = agreed(self._all(lambda: _with_offload_speed(meter.end(), self._blocks, self._device)))
            if not skipped and any(block.seconds > 0 for block in costs.blocks):
                self.costs = costs
                self._choose(costs)
                return
            skipped = True  # no backward: training_step gave None
        elif self._check is not None:
            check, self._check = self._check, None
            peaks = self._gather(max(stretch.peak for stretch in check.stop()))
            if not skipped:
                self._compare(max(peaks))
        self._steps_begun -= skipped

    def leave(self) -> None:
        """The run ends, maybe in the middle of a step."""
        meter, check, self._meter, self._check = self._meter, self._check, None, None
        if meter is not None:
            meter.abandon()
        if check is not None:
            check.stop()

    def _all(self, find: Callable[[], Any]) -> list[Any]:
        """What every rank finds; where one fails, all do."""
        try:
            own: Any = find()
        except (OSError, RuntimeError, ValueError) as problem:
            own = problem
        found = self._gather(own)
        for rank, one in enumerate(found):
            if isinstance(one, Exception):
                raise RuntimeError(f"checkpointing.policy=auto, on rank {rank}: {one}") from one
        return found

    def solve(self, budget_bytes: int) -> MemoryPlan:
        """The fastest plan for a budget, the same on every rank: rank 0 looks for it. A collective.

        Raises:
            ValueError: Nothing fits, or nothing has been measured.
        """
        if self.costs is None:
            raise ValueError("checkpointing.policy=auto has not measured a step yet.")
        found: Any = None
        try:
            if self._is_first:
                found = solve(self.costs, budget_bytes, self._blocks.options.offload).to_dict()
        except (ValueError, RuntimeError) as problem:
            found = problem
        found = self._gather(found)[0]
        if isinstance(found, Exception):
            raise found
        return MemoryPlan.from_dict(found)

    def _choose(self, costs: StepCosts) -> None:
        budget = min(self._gather(self._budget_bytes()))
        plan = self.solve(budget)
        self._blocks.use(plan)
        self._predicted = predict(costs, plan)
        self._report(plan_table(costs, plan, budget))

    def _compare(self, peak_bytes: int) -> None:
        predicted = self._predicted.peak_bytes
        self._report(
            f"A step under this plan took {peak_bytes / GIB:.3f} GiB on the rank that takes most; predicted were "
            f"{predicted / GIB:.3f} GiB ({peak_bytes / max(predicted, 1) - 1:+.1%})."
        )

    def _budget_bytes(self) -> int:
        given = self._blocks.options.budget_gib
        if given is not None:
            return int(given * GIB)
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + reserved - _SPARE * total)


def check_budget(options: Checkpointing, device: torch.device) -> None:
    """Raise ``ValueError`` if ``auto`` has no budget, and nothing on the device says what is left."""
    if options.policy == "auto" and options.budget_gib is None and device.type != "cuda":
        raise ValueError(
            f"checkpointing.policy=auto needs checkpointing.budget_gib on {device.type}: GiB that a step may take "
            "beyond parameters and optimizer state."
        )


def _with_offload_speed(costs: StepCosts, blocks: CheckpointedBlocks, device: torch.device) -> StepCosts:
    may_offload = blocks.options.offload
    sizes = [
        region.num_bytes for block in costs.blocks for region in block.regions if is_kept(region.name, may_offload)
    ]
    if not any(sizes):
        return costs
    speed = _bytes_per_second(blocks.host_store(), max(sizes), device)
    return StepCosts(costs.seconds, costs.blocks, costs.moments, speed)


def _bytes_per_second(store: Store, num_bytes: int, device: torch.device) -> float:
    """How fast a tensor goes to host memory, or comes back."""
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    begin = time.perf_counter()
    store.put(tensor).get()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 2 * num_bytes / (time.perf_counter() - begin)
