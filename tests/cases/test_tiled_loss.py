"""A loss that is computed in pieces is the mean over all tokens, whatever the size of the pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees
from lightning_longctx.loss import TiledLoss, linear_cross_entropy
from tests.cases.tiny import SGD, TINY, Gradients, assert_equal_numbers, data_rank, make_trainer, samples

TOKENS, VOCAB = 10, 12
LABELS = [1, 2, -100, -100, -100, 3, 4, 5, 6, 7]
EXPECTED = 1.9402


def logits() -> Tensor:
    return torch.arange(TOKENS * VOCAB, dtype=torch.float64).sin().view(TOKENS, VOCAB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile_tokens", range(1, TOKENS + 2))
def test_the_value_that_was_reported(tile_tokens: int, dtype: torch.dtype) -> None:
    """The logits are states, and the matrix is one: the product is the logits themselves."""
    labels = torch.tensor(LABELS)
    states, weight = logits().to(dtype).requires_grad_(), torch.eye(VOCAB, dtype=dtype, requires_grad=True)
    total, count = linear_cross_entropy(states, weight, labels, tile_tokens=tile_tokens)
    mean = total / count
    assert mean.item() == pytest.approx(EXPECTED, abs=5e-5)
    whole = F.cross_entropy(F.linear(states, weight), labels, ignore_index=-100)
    torch.testing.assert_close(mean, whole, rtol=1e-6, atol=0)
    expected = torch.autograd.grad(whole, (states, weight))
    for actual, right in zip(torch.autograd.grad(mean, (states, weight)), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-6, atol=1e-7)


def train(degrees: dict[str, Any], tile_tokens: Any, sharding: str = "replicate") -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step over two samples of very unequal numbers of labels, in two micro-batches."""
    torch.manual_seed(0)
    recorder, chosen = Gradients(), Degrees(**degrees)
    module = CausalLM(TINY, optimizer=SGD, loss=TiledLoss(tile_tokens=tile_tokens))
    rank, ranks = data_rank(chosen)
    trainer = make_trainer(
        chosen, sharding=sharding, callbacks=[recorder], accumulate_grad_batches=2 // ranks, max_steps=1
    )
    trainer.fit(module, DataLoader(samples(2)[rank::ranks], batch_size=1))  # type: ignore[arg-type]
    return float(trainer.callback_metrics["train_loss"]), recorder.steps[0]


SPREADS = [
    (1, {}, "auto", "replicate"),
    (1, {}, 3, "replicate"),
    (1, {}, 3, "fsdp"),
    (2, {"context": 2}, 3, "fsdp"),
    (2, {"tensor": 2}, 3, "replicate"),
    (4, {"context": 2, "tensor": 2}, 5, "fsdp"),
]


@pytest.fixture(scope="module")
def whole(gloo: Any) -> tuple[float, dict[str, Tensor]]:
    """One process, whole logits."""
    return gloo(1).run(train, {}, None)[0]


@pytest.mark.parametrize(("world", "degrees", "tile_tokens", "sharding"), SPREADS)
def test_a_run_in_tiles_has_the_numbers_of_whole_logits(
    gloo: Any, whole: Any, world: int, degrees: dict[str, Any], tile_tokens: Any, sharding: str
) -> None:
    loss, gradients = whole
    for found, made in gloo(world).run(train, degrees, tile_tokens, sharding):
        assert found == pytest.approx(loss, rel=1e-6)
        assert_equal_numbers(made, gradients, 1e-6)
