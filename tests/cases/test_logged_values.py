"""What is shown is what was computed: logged means, maxima and perplexities for every spread of the tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric

from lightning_longctx import CausalLM, Degrees, LongContextMixin
from lightning_longctx.strategy.gradients.norms import whole
from tests.cases.tiny import (
    LEARNING_RATE,
    SGD,
    TINY,
    data_rank,
    make_trainer,
    samples,
    tiny_decoder,
    token_losses,
)

LAYOUTS = ("contiguous", "zigzag", "striped")


class WithMaxima(CausalLM):
    """Logs, besides its means, the largest loss of a token: with Lightning's own reduction, and as a metric."""

    def __init__(self) -> None:
        super().__init__(TINY, optimizer=SGD)
        self.largest = MaxMetric()

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        self.log("train_max", self.max_loss(batch), reduce_fx="max", sync_dist=True, batch_size=1)
        return super().training_step(batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        largest = self.max_loss(batch)
        self.log("val_max", largest, reduce_fx="max", sync_dist=True, batch_size=1)
        self.largest.update(largest)
        self.log("val_max_metric", self.largest, batch_size=1)

    @torch.no_grad()
    def max_loss(self, batch: dict[str, Any]) -> Tensor:
        """Minus infinity if this rank has no token that counts."""
        labels = batch["shift_labels"].flatten()
        losses = F.cross_entropy(whole(self(batch)).flatten(0, 1), labels, ignore_index=-100, reduction="none")
        return torch.cat([losses[labels != -100], torch.tensor([-math.inf])]).max()


class StepValues(Callback):
    """Training metrics after every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        metrics = trainer.callback_metrics
        self.steps.append({name: float(metrics[name]) for name in ("train_loss", "train_max")})


def logged(degrees: Degrees, layout: str) -> tuple[dict[str, float], list[dict[str, float]], dict[str, float]]:
    """Metrics of a validation, of two training steps on two sequences each, and of a validation after them."""
    rank, num_ranks = data_rank(degrees)
    batch_size = 2 // num_ranks
    torch.manual_seed(0)
    module, recorder = WithMaxima(), StepValues()
    trainer = make_trainer(degrees, layout, callbacks=[recorder])
    validation = DataLoader(samples(4, seed=1)[rank::num_ranks], batch_size=batch_size)
    [before] = trainer.validate(module, validation, verbose=False)
    trainer.fit(module, DataLoader(samples(4)[rank::num_ranks], batch_size=batch_size))
    [after] = trainer.validate(module, validation, verbose=False)
    return dict(before), recorder.steps, dict(after)


def by_hand() -> tuple[dict[str, float], list[dict[str, float]], dict[str, float]]:
    decoder = tiny_decoder()
    optimizer = torch.optim.SGD(decoder.parameters(), lr=LEARNING_RATE)

    def validated() -> dict[str, float]:
        with torch.no_grad():
            losses = token_losses(decoder, samples(4, seed=1))
        mean, largest = losses.mean().item(), losses.max().item()
        values = {"val_loss": mean, "val_perplexity": math.exp(mean)}
        return values | {"val_max": largest, "val_max_metric": largest}

    before, steps = validated(), []
    for start in (0, 2):
        losses = token_losses(decoder, samples(4)[start : start + 2])
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        steps.append({"train_loss": losses.mean().item(), "train_max": losses.max().item()})
    return before, steps, validated()


@pytest.mark.parametrize(
    ("num_ranks", "degrees"),
    [
        (1, Degrees()),
        (2, Degrees(context=2)),
        (4, Degrees(context=4)),
        (4, Degrees(context=4, inner_ring=2)),
        (4, Degrees(context=2)),
        (4, Degrees(context=2, tensor=2)),
    ],
)
def test_logged_values_are_those_of_all_tokens(gloo: Any, num_ranks: int, degrees: Degrees) -> None:
    """B23: the logged, the validation and the monitored values are reduced like the loss that is trained on."""
    before, steps, after = by_hand()
    layout = LAYOUTS[(num_ranks + degrees.inner) % 3]
    for found_before, found_steps, found_after in gloo(num_ranks).run(logged, degrees, layout):
        assert found_before == pytest.approx(before, rel=1e-5)
        for found, expected in zip(found_steps, steps, strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
        assert found_after == pytest.approx(after, rel=1e-5)


class GivenLosses(LongContextMixin, LightningModule):
    """The loss of a token is its label."""

    def __init__(self) -> None:
        super().__init__(optimizer=SGD)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def validation_step(self, batch: dict[str, Any]) -> None:
        counted = batch["shift_labels"][batch["shift_labels"] != -100]
        self.log_tokens("loss", counted.sum(), counted.numel())
        self.log_tokens("perplexity", counted.sum(), counted.numel(), exponentiate=True)


def given_losses(degrees: Degrees, layout: str, losses: list[list[int]]) -> dict[str, float]:
    rank, num_ranks = data_rank(degrees)
    rows = [torch.tensor([row]) for row in losses[rank::num_ranks]]
    batches = [{"input_ids": torch.zeros_like(row), "shift_labels": row} for row in rows]
    trainer = make_trainer(degrees, layout)
    return dict(trainer.validate(GivenLosses(), DataLoader(batches, batch_size=None), verbose=False)[0])


@pytest.mark.parametrize(("num_ranks", "degrees"), [(1, Degrees()), (2, Degrees(context=2)), (4, Degrees(context=2))])
def test_perplexity_of_seven_and_one(gloo: Any, num_ranks: int, degrees: Degrees) -> None:
    """B23: 7 tokens at 1 and one at 3: exp(1.25) = 3.4903, not exp(2) or a mean of exponentials."""
    none = [-100] * 16
    one_row, two_rows = [[1] * 7 + [-100] + [3] + [-100] * 7, none], [[1] * 7 + [-100] * 9, none[:-1] + [3]]
    for losses in (one_row, two_rows):
        for found in gloo(num_ranks).run(given_losses, degrees, "contiguous", losses):
            assert found == pytest.approx({"loss": 1.25, "perplexity": 3.4903}, abs=5e-5)
