"""A checkpoint from the moment that Lightning asks for it until there are parameters to take it.

Lightning reads checkpoints before ``Strategy.setup``, with ``weights_only`` as the user gave it, or after, and then
forgets it. So this reads before, and ``setup`` fills in the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_longctx._upstream import is_sharded_checkpoint
from lightning_longctx.models.atomic import found
from lightning_longctx.strategy.checkpoints.tensors import load_sharded, load_whole, read_rest


class Restoring:
    """What one run of a Trainer restores, if anything."""

    def __init__(self) -> None:
        self._has_asked = False
        self._path: Path | None = None
        self._rest: dict[str, Any] = {}

    def read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Read all but sharded tensors. A collective.

        Args:
            path: Rank 0's is taken.
            weights_only: As in ``torch.load``.

        Raises:
            ValueError: There is no checkpoint, only some ranks have found one, or a rank cannot read it. Raised on
                every rank.
        """
        self._path = Path(str(self._agreed(str(path))))
        problem: ValueError | None = None
        try:
            self._rest = read_rest(self._path, weights_only)
        except ValueError as unreadable:
            problem = unreadable
        told: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if problem is None else str(problem))
        if (first := next((text for text in told if text is not None), None)) is not None:
            where = "" if None not in told else f" (on rank {told.index(first)} alone)"
            raise ValueError(f"{first}{where}") from problem
        return self._rest

    def agree(self) -> None:
        """Where no checkpoint has been read: check that no rank has found one. Then a collective."""
        if not self._has_asked:
            self._agreed(None)

    def take(self, module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool) -> dict[str, Any] | None:
        """Fill in the tensors, and forget the checkpoint. A collective.

        Returns:
            What is not sharded, if there is a checkpoint.
        """
        path, rest, self._path, self._rest = self._path, self._rest, None, {}
        if path is None:
            return None
        if is_sharded_checkpoint(path):
            load_sharded(path, module, optimizers, strict=strict)
        else:
            load_whole(path, rest, module, optimizers, strict=strict)
        return rest

    def _agreed(self, path: str | None) -> str | None:
        self._has_asked = True
        own = str(found(Path(path))) if path is not None and dist.get_rank() == 0 else path
        paths: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(paths, own)
        without = [rank for rank, other in enumerate(paths) if other is None]
        if without and len(without) < len(paths):
            rank = next(rank for rank, other in enumerate(paths) if other is not None)
            raise ValueError(
                f"rank {rank} resumes from {paths[rank]}, but ranks {without} found no checkpoint: ckpt_path='last' "
                "looks into the folder on every rank. Put checkpoints where all ranks see them, or give ckpt_path the "
                "path itself."
            )
        return paths[0]
