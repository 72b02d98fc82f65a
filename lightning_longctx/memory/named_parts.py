"""Whether the submodules that options name are ever called."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_longctx.memory.blocks import named_blocks
from lightning_longctx.memory.policy import ATTENTION, Checkpointing


class NamedParts:
    """Watches, until it has been asked, for calls of submodules that ``checkpointing`` names.

    A submodule whose parameters are used without calling it (``F.linear(x, part.weight)``) would be named in vain.

    Args:
        module: The whole one.
        options: The user's.
    """

    def __init__(self, module: nn.Module, options: Checkpointing) -> None:
        self._waiting: dict[str, tuple[str, RemovableHandle]] = {}
        names = {name: "keep" for name in options.keep if name != ATTENTION}
        names |= {name: "recompute" for name in options.recompute} | {name: "tiles" for name in options.tiles}
        for block_name, block in named_blocks(module, options.blocks).items() if names else ():
            for name, option in names.items():
                whole = f"{block_name}.{name}"
                called = partial(self._called, whole)
                self._waiting[whole] = option, block.get_submodule(name).register_forward_pre_hook(called)

    def _called(self, name: str, *_: Any) -> None:
        self._waiting.pop(name)[1].remove()

    def warn_of_those_not_called(self) -> None:
        """Say which were not; nothing is watched any more."""
        waiting, self._waiting = self._waiting, {}
        for _, hook in waiting.values():
            hook.remove()
        if waiting:
            (first, (option, _)), more = next(iter(waiting.items())), len(waiting) - 1
            rank_zero_warn(
                f"checkpointing.{option} names {first}{f' and {more} more' * bool(more)}, but the step did not call it "
                "as a module, so that naming it changes nothing. Name a submodule that the block calls."
            )
