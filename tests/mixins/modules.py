"""Runs of modules that inherit from the package, for the ranks of a pool."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx.mixins import CausalLM, LongContextMixin
from lightning_longctx.models import DecoderConfig
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.topology import Degrees
from tests.strategy.modules import samples
from tests.strategy.runs import QUIET, weights

TINY = DecoderConfig(vocab_size=32, width=16, num_layers=2, num_heads=4, num_kv_heads=2)
SGD = partial(torch.optim.SGD, lr=0.1)


def share(count: int, degrees: Degrees, seed: int = 0) -> DataLoader:
    """This data rank's samples, in turn."""
    rank, world, together = dist.get_rank(), dist.get_world_size(), degrees.context * degrees.head * degrees.tensor
    return DataLoader(samples(count, seed=seed)[rank // together :: world // together], batch_size=1)


def make_trainer(degrees: Degrees, **options: Any) -> Trainer:
    defaults = dict(devices=dist.get_world_size(), max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=1)
    return Trainer(strategy=LongContextStrategy(degrees), **{**QUIET, **defaults, **options})


class Recorder(Callback):
    """``train_loss`` after every micro-batch that ends in a step, and metrics of each validation."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.validations: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if len(self.steps) < trainer.global_step:
            self.steps.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val")}
            self.validations.append(metrics)


def causal_lm(degrees: Degrees, accumulate: int) -> tuple[list[float], list[dict[str, float]], dict[str, Tensor]]:
    torch.manual_seed(3)
    module, recorder = CausalLM(TINY, optimizer=SGD), Recorder()
    trainer = make_trainer(
        degrees,
        accumulate_grad_batches=accumulate,
        callbacks=[recorder, EarlyStopping("val_loss/dataloader_idx_1", patience=5)],
    )
    validation = [share(4, degrees, seed=1), share(4, degrees, seed=2)]
    trainer.fit(module, share(8, degrees), validation)
    return recorder.steps, recorder.validations, weights(module)


def predictions(degrees: Degrees) -> list[dict[str, Tensor]]:
    torch.manual_seed(3)
    return make_trainer(degrees).predict(CausalLM(TINY), share(2, degrees))  # type: ignore[return-value]


class Losses(LongContextMixin, LightningModule):
    """Logs given (sum, count) pairs; ``tokens`` of the batch are not looked at."""

    def __init__(self, pairs: list[tuple[float, int]], optimizer: Any = SGD) -> None:
        super().__init__(optimizer=optimizer)
        self.pairs = pairs
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        total, count = self.pairs[batch_idx]
        self.log_tokens("val_loss", torch.tensor(total), count)
        self.log_tokens("val_perplexity", torch.tensor(total), count, exponentiate=True)


def validated(pairs: list[tuple[float, int]], odd_entries: list[int]) -> dict[str, float]:
    """Metrics of one process over batches that begin with an entry of misleading length."""
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    batches = [{"cu_seqlens": torch.arange(length), "input_ids": tokens} for length in odd_entries]
    batch_loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    return make_trainer(Degrees()).validate(Losses(pairs), batch_loader, verbose=False)[0]  # type: ignore[return-value]


class TwoLosses(LongContextMixin, LightningModule):
    """A loss over two kinds of batches, weighted by its own count."""

    def __init__(self, combine: bool) -> None:
        super().__init__(optimizer=SGD)
        self.combine = combine
        self.scores = torch.nn.Parameter(torch.zeros(32))

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        pairs = []
        for member in batch.values():
            counted = member["shift_labels"] != -100
            pairs.append(((self.scores[member["input_ids"]] * counted).sum(), counted.sum()))
        if self.combine:
            return self.token_mean(pairs[0][0] + pairs[1][0], pairs[0][1] + pairs[1][1])
        return sum(total for total, _ in pairs)  # type: ignore[return-value]


def two_losses(degrees: Degrees, combine: bool = True) -> dict[str, Tensor]:
    module = TwoLosses(combine)
    loaders = {"a": share(4, degrees, seed=1), "b": share(4, degrees, seed=2)}
    make_trainer(degrees).fit(module, loaders)
    return weights(module)
