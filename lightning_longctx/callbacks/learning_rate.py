"""Learning rate, one point per optimizer step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor

from lightning_longctx._upstream import is_first_of_window


class LearningRate(LearningRateMonitor):
    """Lightning's ``LearningRateMonitor``, which alone writes a point per micro-batch under gradient accumulation."""

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if is_first_of_window(trainer):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
