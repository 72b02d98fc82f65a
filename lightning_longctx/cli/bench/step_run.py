"""Run a recipe whose steps alternate with those of a bare loop."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_longctx.cli.bench.bare_loop import Alternation, Steps
from lightning_longctx.cli.train import LongContextCLI, speak_once


def fit_arguments(config: str | Sequence[str], folder: str) -> list[str]:
    """The command line of ``fit`` for steps of a recipe and nothing else.

    Args:
        config: The recipe, or several of which later ones override earlier ones.
        folder: For what the run writes.
    """
    recipes = [config] if isinstance(config, str) else config
    return [
        "fit",
        *(part for recipe in recipes for part in ("--config", recipe)),
        "--trainer.max_epochs=-1",
        "--trainer.accumulate_grad_batches=1",
        "--trainer.limit_val_batches=0",
        "--trainer.num_sanity_val_steps=0",
        f"--trainer.default_root_dir={folder}",
    ]


def alternate(arguments: Sequence[str], folder: str) -> tuple[Trainer, list[dict[str, Steps]]]:
    """Train as ``fit`` with these arguments would, with a bare step after every step.

    Every process of the run comes here: Lightning starts the others with this process's own command line.

    Args:
        arguments: ``fit`` and its options.
        folder: For logs.

    Returns:
        The Trainer, and the steps of ``bare`` and ``longctx`` on every rank.
    """
    found: list[Alternation] = []

    class Alternating(LongContextCLI):
        def after_instantiate_classes(self) -> None:
            super().after_instantiate_classes()
            found.append(Alternation(deepcopy(self.model)))
            _rearrange(self.trainer, found[0], folder)

    speak_once()
    warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter.*")
    command = Alternating(list(arguments))
    return command.trainer, found[0].by_rank


def _rearrange(trainer: Any, alternation: Alternation, folder: str) -> None:
    """Leave out what writes checkpoints, log to the folder, and put the alternation behind all other callbacks."""
    kept = [callback for callback in trainer.callbacks if not isinstance(callback, Checkpoint | SaveConfigCallback)]
    trainer.callbacks = [*kept, alternation]
    if trainer.loggers:
        trainer.loggers = [TensorBoardLogger(Path(folder), name=None)]
