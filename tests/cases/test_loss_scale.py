"""Loss, gradients and one SGD step where the tokens that count are spread very unevenly over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_longctx import Degrees
from lightning_longctx.testing import GlooPool
from tests.cases.tiny import (
    LEARNING_RATE,
    LENGTH,
    SGD,
    TINY,
    Gradients,
    assert_equal_numbers,
    data_rank,
    make_trainer,
    named_weights,
    positions_by_rank,
    tiny_decoder,
    tiny_module,
)

CONTEXT_2, CONTEXT_4, CONTEXT_2X2 = Degrees(1, 2), Degrees(1, 4), Degrees(1, 4, 2)
DATA_2_CONTEXT_2 = Degrees(2, 2)


@dataclass(frozen=True)
class Case:
    """Two sequences of 16 tokens, of which ``counts[data rank][context rank]`` labels count."""

    degrees: Degrees
    counts: tuple[tuple[int, ...], ...]
    layout: str = "contiguous"
    sharding: str = "replicate"
    plain: bool = False
    shifted: bool = False

    @property
    def num_ranks(self) -> int:
        return len(self.counts) * len(self.counts[0])


def batch_of(case: Case) -> dict[str, Tensor]:
    """``input_ids`` and ``labels`` or ``shift_labels`` [2, 16] with the wanted number of labels in every shard."""
    tokens = torch.randint(TINY.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(tokens, -100)
    rows = 2 // len(case.counts)
    for data, counts in enumerate(case.counts):
        shards = positions_by_rank(case.layout, LENGTH, len(counts))
        for count, positions in zip(counts, shards, strict=True):
            slots = [(row, position) for row in range(data * rows, (data + 1) * rows) for position in positions]
            for row, position in slots[:count]:
                labels[row, position] = (7 * position + row) % TINY.vocab_size
    if case.shifted:
        return {"input_ids": tokens, "shift_labels": labels}
    assert (labels[:, -1] == -100).all(), "nothing follows the last token"
    return {"input_ids": tokens, "labels": labels.roll(1, dims=1)}


class Plain(LightningModule):
    """The tiny model in the hands of a user who returns a mean, which is NaN where no label counts."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = tiny_decoder().float()

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        logits = self.decoder(batch["input_ids"], batch["position_ids"], batch["sequence"])
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


def train(case: Case) -> tuple[float | None, dict[str, Tensor], dict[str, Tensor]]:
    """Logged loss, gradients and updated weights after one step, as this rank sees them."""
    batch = batch_of(case)
    rank, num_ranks = data_rank(case.degrees)
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)][rank::num_ranks]
    if num_ranks == 2:
        assert len(rows) == 1
    module = Plain() if case.plain else tiny_module()
    gradients = Gradients()
    trainer = make_trainer(case.degrees, case.layout, case.sharding, callbacks=[gradients])
    trainer.fit(module, DataLoader(rows, batch_size=len(rows)))
    assert trainer.global_step == 1
    loss = trainer.callback_metrics.get("train_loss")
    return None if loss is None else float(loss), gradients.steps[0], named_weights(module)


def by_hand(case: Case) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    decoder, batch = tiny_decoder(), batch_of(case)
    labels = batch["shift_labels"] if case.shifted else F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = F.cross_entropy(decoder(batch["input_ids"]).flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    assert int((labels != -100).sum()) == sum(map(sum, case.counts))
    grads = {f"decoder.{name}": weight.grad for name, weight in decoder.named_parameters()}
    weights = {f"decoder.{name}": weight.detach() for name, weight in decoder.named_parameters()}
    return loss.item(), grads, {name: weights[name] - LEARNING_RATE * grads[name] for name in weights}  # type: ignore


CASES = [
    Case(CONTEXT_2, ((7, 1),)),
    Case(CONTEXT_2, ((1, 7),), layout="zigzag"),
    Case(CONTEXT_2, ((0, 5),), layout="striped", plain=True),
    Case(CONTEXT_2, ((16, 1),), plain=True, shifted=True, sharding="fsdp"),
    Case(CONTEXT_4, ((7, 1, 0, 0),), plain=True),
    Case(CONTEXT_4, ((7, 1, 2, 0),), sharding="fsdp"),
    Case(CONTEXT_2X2, ((0, 0, 1, 7),), layout="zigzag", shifted=True),
    Case(CONTEXT_2X2, ((7, 1, 1, 3),), layout="striped", plain=True, sharding="fsdp"),
    Case(DATA_2_CONTEXT_2, ((7, 0), (0, 1))),
    Case(DATA_2_CONTEXT_2, ((7, 1), (2, 6)), layout="zigzag", plain=True),
    Case(DATA_2_CONTEXT_2, ((0, 0), (7, 1)), layout="striped", sharding="fsdp", plain=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_that_of_one_process(gloo: Any, case: Case) -> None:
    """B06: the mean is over all tokens that count, not over the ranks' means; SGD shows any constant factor."""
    loss, grads, weights = by_hand(case)
    for logged, found_grads, found_weights in gloo(case.num_ranks).run(train, case):
        assert case.plain or logged == pytest.approx(loss, abs=1e-5)
        assert_equal_numbers(found_grads, grads)
        assert_equal_numbers(found_weights, weights)


class GivenLosses(LightningModule):
    """The loss of a token is its label, times a weight that starts at 1; attention is called, and means nothing.

    Args:
        mean: How the mean is written; over no token each of them is 0/0.
    """

    def __init__(self, mean: str) -> None:
        super().__init__()
        self.mean = mean
        self.weight = nn.Parameter(torch.ones(1))  # parameters of no dim cannot be distributed

    def forward(self, batch: dict[str, Any]) -> Tensor:
        nothing = torch.zeros(*batch["input_ids"].shape, 2)[:, None] * self.weight
        attended = F.scaled_dot_product_attention(nothing, nothing, nothing, is_causal=True)
        labels, counts = batch["shift_labels"], batch["shift_labels"] != -100
        losses = self.weight * labels.masked_fill(~counts, 0) + attended.sum()
        if self.mean == "of the selected":
            return losses[counts].mean()
        if self.mean == "masked":
            return (losses * counts).sum() / counts.sum()
        return losses.masked_fill(~counts, float("nan")).nanmean()

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


def given_losses(degrees: Degrees, losses: list[list[int]], mean: str) -> tuple[float, float]:
    """Gradient and weight after one step; ``losses[data rank]`` are those of 8 tokens on every context rank."""
    rank, _ = data_rank(degrees)
    labels = torch.tensor([losses[rank]])
    module, gradients = GivenLosses(mean), Gradients()
    trainer = make_trainer(degrees, "contiguous", callbacks=[gradients])
    trainer.fit(module, DataLoader([{"input_ids": torch.zeros_like(labels), "shift_labels": labels}], batch_size=None))
    return gradients.steps[0]["weight"].item(), named_weights(module)["weight"].item()


SEVEN, ONE, NONE = [1] * 7 + [-100], [3] + [-100] * 7, [-100] * 8


@pytest.mark.parametrize("mean", ["of the selected", "masked", "without NaN"])
@pytest.mark.parametrize(
    ("degrees", "losses"),
    [
        (CONTEXT_2, [SEVEN + ONE]),
        (CONTEXT_4, [SEVEN + ONE + NONE + NONE]),
        (CONTEXT_4, [NONE + ONE + NONE + SEVEN]),
        (DATA_2_CONTEXT_2, [SEVEN + NONE, NONE + ONE]),
        (DATA_2_CONTEXT_2, [NONE + NONE, SEVEN + ONE]),
    ],
)
def test_seven_losses_of_one_and_one_of_three(gloo: Any, degrees: Degrees, losses: list[list[int]], mean: str) -> None:
    """B06: the mean is 1.25; a mean of the ranks' means would be 2, a sum over them 4 or 2.5."""
    pool: GlooPool = gloo(degrees.context * len(losses))
    for gradient, weight in pool.run(given_losses, degrees, losses, mean):
        assert gradient == pytest.approx(1.25, abs=1e-6)
        assert weight == pytest.approx(1 - LEARNING_RATE * 1.25, abs=1e-6)
