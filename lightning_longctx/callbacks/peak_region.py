"""In which part of a training step the memory of this process rose to its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_longctx._upstream import in_backward
from lightning_longctx.memory.blocks import named_blocks

OUTSIDE = "outside of training steps"
FORWARD, LOSS, BACKWARD, AFTER, OPTIMIZER = "forward", "loss", "backward", "after backward", "optimizer step"
_PARTS = (OUTSIDE, FORWARD, LOSS, BACKWARD, AFTER, OPTIMIZER)

_NEARLY = 1.01
"""A peak that is higher by less than this belongs to the region of the former one: the resident set wavers, and where
freed memory stays in the process, so do all regions after the one that needed it."""


class PeakRegion:
    """Reads a counter that never falls wherever one region ends, and remembers in which it last rose.

    Regions follow each other: ``forward of NAME`` begins when the block NAME is called, ``backward of NAME`` when the
    gradient of what it returned is there; if it is run again in backward, that is part of it. ``loss`` is what lies
    between the last block's forward and its backward: head and loss, forward and backward. ``forward`` and
    ``backward`` are what comes before the first block and after its backward; ``after backward`` completes gradients;
    ``optimizer step`` clips, too. Blocks within ``torch.compile`` are not told apart.

    Args:
        module: Its repeated blocks are told apart.
        peak: The counter, in bytes.
    """

    def __init__(self, module: nn.Module, peak: Callable[[], int]) -> None:
        blocks = named_blocks(module)
        self.names = (*_PARTS, *(f"{part} of {name}" for name in blocks for part in (FORWARD, BACKWARD)))
        self._peak = peak
        self._active = False
        self._current, self._found = OUTSIDE, OUTSIDE
        self._last = self._named = peak()
        self._handles = list(_hooks(self, blocks))

    @property
    def found(self) -> str:
        """Where the counter last rose, up to now."""
        self.enter(self._current)
        return self._found

    def begin_step(self) -> None:
        """A training step begins."""
        self._active = True
        self.enter(FORWARD)

    def end_step(self) -> None:
        """What follows is no training, until the next step."""
        self._active = False
        self.enter(OUTSIDE)

    def begin_backward(self) -> None:
        """Gradients are asked for; those of head and loss belong to ``loss``."""
        if self._current != LOSS:
            self.enter(BACKWARD)

    def enter(self, name: str) -> None:
        """The region that was current ends here, and another one begins."""
        peak = self._peak()
        if peak < self._last:  # somebody has reset the counter
            self._named = 0
        if peak > self._named * _NEARLY:
            self._found, self._named = self._current, peak
        self._last, self._current = peak, name

    def enter_forward(self, name: str) -> None:
        """A block is called, unless that is in backward or in evaluation."""
        if self._active and not in_backward():
            self.enter(name)

    def enter_backward(self, name: str, tensor: Tensor | None) -> None:
        """A region will begin when the gradient of ``tensor`` is there."""
        if self._active and not in_backward() and tensor is not None:
            tensor.register_hook(lambda gradient: self.enter(name))

    def remove(self) -> None:
        """Take all hooks off the module."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _hooks(region: PeakRegion, blocks: Mapping[str, nn.Module]) -> Iterable[RemovableHandle]:
    """One reading per block forward and backward, and those that end a stack."""
    names = list(blocks)
    for place, (name, block) in enumerate(blocks.items()):
        follower = names[place + 1] if place + 1 < len(names) else None
        after = None if follower and _stack(follower) == _stack(name) else FORWARD if follower else LOSS
        first = place == 0 or _stack(names[place - 1]) != _stack(name)

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name, first: bool = first) -> None:
            if not torch.compiler.is_compiling():
                region.enter_forward(f"{FORWARD} of {name}")
                if first:
                    region.enter_backward(BACKWARD, differentiable((args, kwargs)))

        def behind(module: nn.Module, args: Any, out: Any, name: str = name, after: str | None = after) -> None:
            if not torch.compiler.is_compiling():
                region.enter_backward(f"{BACKWARD} of {name}", differentiable(out))
                if after is not None:
                    region.enter_forward(after)

        yield block.register_forward_pre_hook(before, with_kwargs=True)
        yield block.register_forward_hook(behind)


def differentiable(values: Any) -> Tensor | None:
    """The first tensor among nested values that takes part in backward."""
    if isinstance(values, Tensor):
        return values if values.requires_grad else None
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return None
    return next((tensor for value in values if (tensor := differentiable(value)) is not None), None)


def _stack(name: str) -> str:
    return name.rpartition(".")[0]
