"""What backward keeps in the steps of a run: the seam between the strategy and the memory room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_longctx import _upstream
from lightning_longctx._upstream import is_compiled
from lightning_longctx.memory.blocks import named_blocks
from lightning_longctx.memory.checkpointed import CheckpointedBlocks
from lightning_longctx.memory.choice.auto import AutoPlan, check_budget
from lightning_longctx.memory.choice.costs import StepCosts
from lightning_longctx.memory.named_parts import NamedParts
from lightning_longctx.memory.plans import MemoryPlan
from lightning_longctx.memory.policy import Checkpointing
from lightning_longctx.memory.tiling.tiles import is_tiled, tile, untile

_BLOCKS = "_longctx_checkpointed_blocks"
PLAN_FILE = "memory_plan.json"


class StepMemory:
    """Applies ``checkpointing`` to modules, and follows ``auto`` through the first steps.

    Args:
        options: The user's.
    """

    def __init__(self, options: Checkpointing) -> None:
        self.options = options
        self._blocks: CheckpointedBlocks | None = None
        self._auto: AutoPlan | None = None
        self._named: NamedParts | None = None
        self._trainer: Trainer | None = None
        self._table = ""

    @property
    def plan(self) -> MemoryPlan:
        """What backward keeps now."""
        assert self._blocks is not None, "the run has not been set up"
        return self._blocks.plan

    @property
    def costs(self) -> StepCosts | None:
        """What ``auto`` has measured; None before, and under other policies."""
        return None if self._auto is None else self._auto.costs

    def use(self, plan: MemoryPlan) -> None:
        """Keep something else from the next step on; on all ranks alike."""
        assert self._blocks is not None, "the run has not been set up"
        self._blocks.use(plan)

    def check(self, device: torch.device) -> None:
        """Raise ``ValueError`` if the options do not fit a device; before anything starts."""
        check_budget(self.options, device)

    def apply(self, module: nn.Module, device: torch.device, num_tensor_ranks: int) -> None:
        """Let a module run in tiles and blocks run again in backward; after tensor parallelism, before FSDP2.

        Raises:
            ValueError: The options do not fit the module.
        """
        vars(module)[_BLOCKS] = CheckpointedBlocks(module, self.options, device)
        self._tile(module, num_tensor_ranks)

    def _tile(self, module: nn.Module, num_tensor_ranks: int) -> None:
        for block in named_blocks(module, self.options.blocks).values() if self.options.tiles else ():
            for name, tokens in self.options.tiles.items():
                tile(block.get_submodule(name), tokens, num_tensor_ranks)

    def begin(self, trainer: Trainer, module: Any, device: torch.device, num_tensor_ranks: int) -> None:
        """A run begins with a module that ``apply`` has seen, in this run or an earlier one.

        Raises:
            ValueError: The policy does not fit the module or the run.
        """
        blocks: CheckpointedBlocks = vars(module)[_BLOCKS]
        blocks.begin(module, self.options)
        self._tile(module, num_tensor_ranks)
        names = [block.name for block in blocks.blocks]
        if self.options != Checkpointing() and names:
            rank_zero_info(f"checkpointing.policy={self.options.policy}: {len(names)} parts, {names[0]} to {names[-1]}")
        self._named = NamedParts(module, self.options) if trainer.state.fn == TrainerFn.FITTING else None
        self._trainer, self._blocks = trainer, blocks
        self._auto, self._table = None, ""
        if self.options.policy == "auto" and trainer.state.fn == TrainerFn.FITTING:
            if not module.automatic_optimization:
                raise ValueError(
                    "checkpointing.policy=auto follows the Trainer's steps, but this module optimizes by itself "
                    "(automatic_optimization=False). Use policy=selective."
                )
            self._auto = AutoPlan(blocks, module, device, _gather, trainer.is_global_zero, self._report)

    def before_micro_batch(self) -> None:
        """A training step begins."""
        if self._auto is not None and self._trainer is not None and _upstream.is_first_of_window(self._trainer):
            self._auto.before_step()

    def before_backward(self) -> None:
        """A training step has its loss."""
        if self._auto is not None:
            self._auto.before_backward()

    def after_gradients(self, skipped: bool) -> None:
        """All gradients of an optimizer step are there; ``skipped`` if no rank steps."""
        if self._named is not None:
            self._named.warn_of_those_not_called()
            self._named = None
            self._warn_without_attention()
        if self._auto is not None:
            self._auto.after_gradients(skipped)

    def _warn_without_attention(self) -> None:
        blocks = [] if self._blocks is None or self.options.policy != "selective" else self._blocks.blocks
        if blocks and not any(is_compiled(block.block) or block.had_attention for block in blocks):
            rank_zero_warn(
                f"checkpointing.policy=selective, but no attention ran inside of the blocks ({blocks[0].name} to "
                f"{blocks[-1].name}). Name those with attention in checkpointing.blocks."
            )

    def solve(self, budget_bytes: int) -> MemoryPlan:
        """What ``auto`` would do under another budget. A collective.

        Raises:
            ValueError: Nothing fits, or ``auto`` has measured nothing.
        """
        if self._auto is None:
            raise ValueError(f"checkpointing.policy={self.options.policy} solves for nothing. Use auto.")
        return self._auto.solve(budget_bytes)

    def save(self, checkpoint: dict[str, Any], path: Path, writes: bool) -> None:
        """Note the plan that ``auto`` has found in a checkpoint, and beside it.

        Args:
            checkpoint: The strategy's entry of it.
            path: Of the checkpoint.
            writes: Whether this rank writes files.
        """
        if self._auto is None or self._auto.costs is None:
            return
        checkpoint["memory_plan"] = self.plan.to_dict()
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"plan": self.plan.to_dict(), "table": self._table.splitlines()}, indent=2)
            (path.parent / PLAN_FILE).write_text(text + "\n", encoding="utf-8")

    def leave(self, module: nn.Module | None) -> None:
        """The run is over: nothing runs again or in tiles, and nothing waits in host memory."""
        auto, blocks, self._auto, self._named = self._auto, self._blocks, None, None
        try:
            if auto is not None:
                auto.leave()
        finally:
            if blocks is not None:
                blocks.close()
            for part in filter(is_tiled, module.modules() if module is not None else ()):
                untile(part)

    def _report(self, text: str) -> None:
        assert self._trainer is not None
        self._table = f"{self._table}\n\n{text}".strip()
        rank_zero_info(f"\ncheckpointing.policy=auto\n\n{text}\n")
        for logger in self._trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and self._trainer.is_global_zero:
                logger.experiment.add_text("memory_plan", self._table, self._trainer.global_step)


def _gather(own: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
