"""Regions of a block, and which one an operation belongs to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import lightning_longctx.attention.exchange
import lightning_longctx.attention.op  # noqa: F401  both define operations
from lightning_longctx._upstream import CAST, PLAIN_ATTENTION, OpOverload, argument, local_part, tree_leaves
from lightning_longctx.memory.policy import ATTENTION, is_kept

RING_OPS = frozenset(
    getattr(torch.ops.longctx, name).default for name in ("ring_attention", "split_heads", "join_heads")
)
"""All of attention's communication is in these."""

ATTENTION_OPS = RING_OPS | PLAIN_ATTENTION
"""What the region ``attention`` keeps the results of."""


class Regions:
    """Knows which region of a block is running, by way of hooks on its submodules.

    Args:
        block: The block.
        names: Submodules to tell apart, by name in the block; ``attention`` needs none.
    """

    def __init__(self, block: nn.Module, names: Collection[str]) -> None:
        self.had_attention = False
        """Whether attention has run in the block."""
        self._running: list[str] = []
        self._hooks: list[RemovableHandle] = []
        for name in names:
            if name != ATTENTION:
                self._hook(block.get_submodule(name), name)

    def enter(self) -> None:
        """A pass through the block begins; the last one may have been left halfway."""
        self._running.clear()

    def of(self, op: Any) -> str | None:
        """Region of an operation that runs now; the innermost submodule's. None: of no region that is told apart."""
        if op in ATTENTION_OPS:
            self.had_attention = True
            return ATTENTION
        return self._running[-1] if self._running else None

    def remove(self) -> None:
        """Take the hooks off."""
        while self._hooks:
            self._hooks.pop().remove()

    def _hook(self, part: nn.Module, name: str) -> None:
        def begin(*_: Any) -> None:
            self._running.append(name)

        def end(*_: Any) -> None:
            if self._running:
                self._running.pop()

        self._hooks += [
            part.register_forward_pre_hook(begin, prepend=True),
            part.register_forward_hook(end, always_call=True),
        ]


def parameter_regions(block: nn.Module, tiled: Iterable[str]) -> tuple[str, ...]:
    """Regions that are worth choosing among: attention, and submodules without children that have parameters.

    Args:
        block: One of the blocks.
        tiled: Submodules that run in tiles, and keep nothing of what is inside.
    """
    names = [name for name, part in block.named_modules() if name and not list(part.children())]
    owners = [name for name in names if next(block.get_submodule(name).parameters(), None) is not None]
    return (ATTENTION, *(name for name in owners if not is_kept(name, tuple(tiled))))


def check_regions(block: nn.Module, named: Iterable[str], option: str, block_name: str) -> None:
    """Raise ``ValueError`` unless every name is a submodule of the block; or ``attention``, of what may be kept."""
    known = [name for name, _ in block.named_modules() if name]
    regions = [ATTENTION] if option in ("keep", "offload") else []
    for name in named:
        if name not in (*known, *regions):
            around, _, _ = name.rpartition(".")
            inside = around + "." if around in known else ""
            there = [one for one in known if one.startswith(inside) and "." not in one.removeprefix(inside)]
            raise ValueError(
                f"checkpointing.{option} names {name!r}, but {block_name} ({type(block).__name__}) has no such "
                f"submodule. It has {', '.join(dict.fromkeys([*regions, *there]))}, and what is inside of them (a.b)."
            )


def can_be_kept(op: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the results of an operation may stand for running it again.

    Views cost nothing; what changes its arguments must happen again; what draws random numbers must as well, or those
    that are drawn after it would be others. Casts are left out because autocast remembers those of weights for a while,
    so that a recomputation can have more of them.
    """
    if not isinstance(op, OpOverload) or op == CAST:
        return False
    if op in PLAIN_ATTENTION:  # draws only with dropout
        return not argument(op, "dropout_p", args, kwargs or {})
    returns = op._schema.returns
    fresh = bool(returns) and all(one.alias_info is None for one in returns) and not op._schema.is_mutable
    return fresh and torch.Tag.nondeterministic_seeded not in op.tags


def new_storages(results: Any, given: Any) -> list[torch.UntypedStorage]:
    """Memory of this rank's results that is none of the arguments'."""
    old = {local_part(one).untyped_storage().data_ptr() for one in tree_leaves(given) if isinstance(one, Tensor)}
    new = [local_part(one).untyped_storage() for one in tree_leaves(results) if isinstance(one, Tensor)]
    return [storage for storage in new if storage.data_ptr() not in old]
