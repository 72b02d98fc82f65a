"""Carries out a memory plan: which blocks run again in backward, and what of them does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from lightning_longctx._upstream import composable_checkpoint, is_compiled
from lightning_longctx.memory.applicable import OURS, runs_again
from lightning_longctx.memory.offloading.offload import Store, open_store
from lightning_longctx.memory.plans import BlockPlan, MemoryPlan, fixed_plan
from lightning_longctx.memory.policy import Checkpointing
from lightning_longctx.memory.regions import ATTENTION_OPS, Regions
from lightning_longctx.memory.saving import Pass

Contexts = tuple[AbstractContextManager, AbstractContextManager]
"""Around a first pass, and around its recomputation."""


class CheckpointedBlock:
    """One block whose forward may run again in backward (composable ``checkpoint``: no parameter changes its name).

    Args:
        block: The block.
        name: In its module, for errors.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block, self.name = block, name
        self.watch: Callable[[], Contexts] | None = None
        """Makes the contexts while a step is measured, in place of the plan's."""
        self.before_again: Callable[[], None] = lambda: None
        """Called when a recomputation begins."""
        self.plan = BlockPlan()
        self._regions = Regions(block, ())
        self._offload: Store | None = None
        self._passes: list[ref[Pass]] = []
        if composable_checkpoint.state(block) is None:
            composable_checkpoint(block, context_fn=partial(_contexts, block))
        setattr(composable_checkpoint.state(block), OURS, self)  # it may have another one's, of a setup that failed
        self.use(self.plan, None)

    def use(self, plan: BlockPlan, offload: Store | None) -> None:
        """Change what backward keeps of passes that begin from now on."""
        self._regions.remove()
        self.plan, self._offload, self._passes = plan, offload, []
        self._regions = Regions(self.block, plan.keep)
        composable_checkpoint.state(self.block).enable_hook = plan.checkpointed

    @property
    def had_attention(self) -> bool:
        """Whether attention has run in the block, where it was looked at."""
        return self._regions.had_attention

    def fetch(self) -> None:
        """Begin to fetch what the last pass has in host memory; its backward comes next."""
        if (store := self._offload) is None:
            return
        alive = [one for which in self._passes if (one := which()) is not None]
        for place in alive[-1].places if alive else ():
            store.prefetch(place)

    def contexts(self) -> Contexts:
        """Around a pass that begins now."""
        if self.watch is not None:
            return self.watch()
        if is_compiled(self.block):
            kept: list[Any] = list(ATTENTION_OPS) if self.plan.keep else []
            return create_selective_checkpoint_contexts(kept)
        if not self.plan.keep:  # a mode would see every operation, in Python
            return nullcontext(), _Before(self.before_again)
        found = Pass(self.plan, self._regions, self.name, self._offload)
        found.before_again = self._again
        if self._offload is not None:
            self._passes = [*(one for one in self._passes if one() is not None), ref(found)]
        return found.modes()

    def _again(self, which: Pass) -> None:
        self._passes = [one for one in self._passes if one() is not which]
        self.before_again()


def _contexts(block: nn.Module) -> Contexts:
    return getattr(composable_checkpoint.state(block), OURS).contexts()


class _Before(AbstractContextManager):
    """Calls something whenever it is entered."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._call()

    def __exit__(self, *raised: object) -> None:
        pass


class CheckpointedBlocks:
    """The repeated blocks of a module, and what backward keeps of each.

    Args:
        module: Not yet distributed by FSDP2.
        options: What to keep; a policy that needs no measuring is in force at once.
        device: That the module runs on.

    Raises:
        ValueError: The options name what is not there, or there is nothing to keep or to run again.
    """

    def __init__(self, module: nn.Module, options: Checkpointing, device: torch.device) -> None:
        self._device = device
        self._offload: Store | None = None
        self.blocks = [CheckpointedBlock(block, name) for name, block in runs_again(module, options).items()]
        for block, before in zip(self.blocks[1:], self.blocks, strict=False):
            block.before_again = before.fetch
        self._begin(options)

    def begin(self, module: nn.Module, options: Checkpointing) -> None:
        """Do what a policy says from now on; ``auto`` begins as ``full``.

        Raises:
            ValueError: The options do not fit the module, or mean other parts of it than it was made for.
        """
        if list(runs_again(module, options)) != [block.name for block in self.blocks]:
            raise ValueError(
                "checkpointing.blocks or checkpointing.recompute name other parts of the module than those of the run "
                "that it was distributed for. Build the module anew."
            )
        self._begin(options)

    def _begin(self, options: Checkpointing) -> None:
        self.options = options
        self.use(fixed_plan(options, len(self.blocks)))

    def use(self, plan: MemoryPlan) -> None:
        """Change what backward keeps; between steps, on all ranks alike.

        Raises:
            ValueError: The plan is for another number of blocks.
        """
        if len(plan.blocks) != len(self.blocks):
            raise ValueError(f"a memory plan of {len(plan.blocks)} blocks does not fit {len(self.blocks)} blocks.")
        for block, its_plan in zip(self.blocks, plan.blocks, strict=True):
            block.use(its_plan, self.host_store() if its_plan.offload else None)
        self.plan = plan

    def host_store(self) -> Store:
        """Where offloaded results wait, made when first asked for."""
        if self._offload is None:
            self._offload = open_store(self._device)
        return self._offload

    def close(self) -> None:
        """Give back what was taken for offloading; nothing runs again from now on."""
        self.use(MemoryPlan("none", (BlockPlan(),) * len(self.blocks)))
        if self._offload is not None:
            self._offload.close()
            self._offload = None
