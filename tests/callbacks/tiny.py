"""A small module and a run of it, importable by the ranks of a pool."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_longctx import Degrees, LongContextStrategy

VOCABULARY, TOKENS = 17, 32


class Samples(Dataset):
    """Random sequences; the labels of the first ``sample % 4`` tokens do not count."""

    def __init__(self, num_samples: int) -> None:
        self.ids = torch.randint(VOCABULARY, (num_samples, TOKENS), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        labels = self.ids[sample].clone()
        labels[: sample % 4 + 1] = -100
        return {"input_ids": self.ids[sample], "labels": labels}


def num_counted(samples: list[int]) -> int:
    """Labels that count in these samples (the first token is never predicted)."""
    return sum(TOKENS - (sample % 4 + 1) for sample in samples)


class Tiny(LightningModule):
    """One attention layer."""

    def __init__(self, lr: float = 0.1, decay_steps: int = 0) -> None:
        super().__init__()
        self.lr, self.decay_steps = lr, decay_steps
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        states = self.tokens(batch["input_ids"])
        q, k, v = self.qkv(states).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        states = states + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(states).flatten(0, 1), batch["shift_labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        time.sleep(0.2)
        self.log("val_loss", self(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        if not self.decay_steps:
            return optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.decay_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    folder: str | Path,
    degrees: Degrees,
    num_samples: int,
    callbacks: list[Callback],
    *,
    module: Tiny | None = None,
    validate: bool = False,
    **options: Any,
) -> Trainer:
    """Train a Tiny with TensorBoard in ``folder``; runs in every rank of a pool, or alone."""
    seed_everything(0)
    torch.manual_seed(0)
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=LongContextStrategy(degrees),
        logger=TensorBoardLogger(folder, name="", version=""),
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(module or Tiny(), DataLoader(Samples(num_samples)), DataLoader(Samples(2)) if validate else None)
    return trainer


def curves(folder: str | Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: for each name its (step, value) points, in the order they were written."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}
