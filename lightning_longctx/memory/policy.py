"""What a user may ask to be kept for backward, as one validated value. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

PolicyName = Literal["none", "full", "selective", "auto"]

GIB = 2**30
"""Bytes of a GiB, which budgets are given in."""

ATTENTION = "attention"
"""The region that attention's kernels are: what they return, ``out`` and ``lse``, is dear to compute and small."""


def is_kept(name: str | None, kept: Collection[str]) -> bool:
    """Whether a region, or a submodule around it, is among those that are named.

    ``attention`` is what attention returns, and no submodule, even where a block has one of that name.
    """
    around = (other + "." for other in kept if other != ATTENTION)
    return name is not None and (name in kept or name.startswith(tuple(around)))


@dataclass(frozen=True)
class Checkpointing:
    """What backward keeps of the repeated blocks of a model, and what it computes again.

    A region is ``attention`` (what attention itself returns), or a submodule of a block by its name in it, such as
    ``mlp.up`` or ``attention_norm``.

    Args:
        policy: ``none`` keeps everything. ``full`` keeps what goes into a block, and runs the block again in backward.
            ``selective`` keeps the results of attention besides, so that neither attention nor its communication runs
            twice (LoongTrain's Selective Checkpoint++, arXiv 2406.18485). ``auto`` measures a step, then solves for the
            fastest choice per block and region that fits ``budget_gib``.
        keep: Further regions to keep under ``full`` and ``selective``.
        recompute: Submodules of the blocks to run again in backward under ``none``.
        offload: Regions that are kept in host memory (on CPU, in a file) and fetched back in backward.
        blocks: Names of the blocks in the module, in which ``*`` stands for one part of a name
            (``model.layers.*``). ``null`` takes the members of every ``nn.ModuleList`` of like modules, and
            of every ``nn.Sequential`` of like modules that have parts.
        budget_gib: Under ``auto``, what a training step may take on a rank beyond what is there before it (parameters,
            optimizer state), in GiB. ``null``, on CUDA only, is what the device has left, less a twentieth.
        tiles: Submodules of the blocks that treat every token alone, such as ``{mlp: 4096}``, and how many tokens of
            them to run at a time, forward and backward.

    Raises:
        ValueError: The options do not fit together; the message names one and the way out.
    """

    policy: PolicyName = "none"
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    blocks: tuple[str, ...] | None = None
    budget_gib: float | None = None
    tiles: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("keep", "recompute", "offload"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))
            if not self.blocks:
                raise ValueError(
                    "checkpointing.blocks=[] names no block. Leave it out to find them, or set policy=none."
                )
        self._check_regions()
        self._check_budget()
        for name, tokens in self.tiles.items():
            if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
                raise ValueError(f"checkpointing.tiles[{name}]={tokens!r} must be a number of tokens, at least 1.")

    def _check_regions(self) -> None:
        if self.policy not in ("none", "full", "selective", "auto"):
            raise ValueError(f"checkpointing.policy={self.policy!r} must be none, full, selective or auto.")
        if self.policy in ("none", "auto") and self.keep:
            why = "keeps everything" if self.policy == "none" else "decides itself"
            raise ValueError(
                f"checkpointing.keep={list(self.keep)} with policy={self.policy}, which {why}. Use full or selective."
            )
        if self.policy != "none" and self.recompute:
            raise ValueError(
                f"checkpointing.recompute={list(self.recompute)} with policy={self.policy}: all that is not kept is "
                "run again already. Use policy=none, or leave it out."
            )
        if self.policy != "auto" and (lost := [name for name in self.offload if not is_kept(name, self.kept)]):
            raise ValueError(
                f"checkpointing.offload={lost}: {self.policy} does not keep these regions. Name them in keep as well, "
                "with policy=full or selective."
            )

    @property
    def kept(self) -> tuple[str, ...]:
        """Regions that are kept of blocks that run again, as far as that needs no measuring."""
        return (*((ATTENTION,) if self.policy == "selective" else ()), *self.keep)

    def _check_budget(self) -> None:
        if self.budget_gib is None:
            return
        if self.policy != "auto":
            raise ValueError(
                f"checkpointing.budget_gib={self.budget_gib} with policy={self.policy}: only auto heeds it. Use auto."
            )
        if not 0 < self.budget_gib < math.inf:
            raise ValueError(f"checkpointing.budget_gib={self.budget_gib} must be positive and finite.")
