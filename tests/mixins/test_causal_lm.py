"""Logged values and weights of the ready model are the same for all degrees, and right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from lightning_longctx.loss import token_cross_entropy
from lightning_longctx.mixins import CausalLM
from lightning_longctx.models import Decoder
from lightning_longctx.testing import FLOAT32, GlooPool, assert_all_close_relative
from lightning_longctx.topology import Degrees
from tests.mixins.modules import TINY, causal_lm, predictions
from tests.strategy.modules import samples

Pools = Callable[[int], GlooPool]


@cache
def by_hand(per_step: int) -> tuple[list[float], dict[str, float], dict[str, torch.Tensor]]:
    """Train on 8 samples, ``per_step`` at a time; losses of the steps, validation metrics, weights."""
    torch.manual_seed(3)
    decoder = Decoder(TINY)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)

    def mean_loss(made: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        tokens = torch.stack([sample["input_ids"] for sample in made])
        labels = torch.stack([sample["labels"] for sample in made])[:, 1:]
        total, count = token_cross_entropy(decoder(tokens)[:, :-1], labels)
        return total / count

    losses = []
    made = samples(8)
    for start in range(0, 8, per_step):
        loss = mean_loss(made[start : start + per_step])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    metrics: dict[str, float] = {}
    with torch.no_grad():
        for index, seed in enumerate((1, 2)):
            loss = mean_loss(samples(4, seed=seed))
            metrics[f"val_loss/dataloader_idx_{index}"] = loss.item()
            metrics[f"val_perplexity/dataloader_idx_{index}"] = loss.exp().item()
    state = {f"decoder.{name}": tensor.detach() for name, tensor in decoder.state_dict().items()}
    return losses, metrics, state


@pytest.mark.parametrize(
    ("num_ranks", "degrees", "accumulate"),
    [
        (1, Degrees(), 1),
        (1, Degrees(), 4),
        (2, Degrees(context=2), 1),
        (2, Degrees(), 2),
        (4, Degrees(context=4, inner_ring=2), 4),
        (4, Degrees(context=2), 2),
    ],
)
def test_logs_and_weights(gloo: Pools, num_ranks: int, degrees: Degrees, accumulate: int) -> None:
    per_step = accumulate * num_ranks // degrees.context
    losses, metrics, state = by_hand(per_step)
    results = gloo(num_ranks).run(causal_lm, degrees, accumulate)
    for steps, validations, _ in results:
        assert steps == pytest.approx(losses, rel=FLOAT32)
        assert validations[-1] == pytest.approx(metrics, rel=FLOAT32)
    assert_all_close_relative(results[0][2], state, "weights")


def test_predictions_say_where_they_belong(gloo: Pools) -> None:
    whole = gloo(1).run(predictions, Degrees())[0]
    parts = gloo(2).run(predictions, Degrees(context=2))
    for index, batch in enumerate(whole):
        positions = torch.cat([part[index]["position_ids"] for part in parts], dim=1)
        tokens = torch.cat([part[index]["tokens"] for part in parts], dim=1)
        order = positions.argsort(dim=1)
        assert torch.equal(positions.gather(1, order), batch["position_ids"])
        assert torch.equal(tokens.gather(1, order), batch["tokens"])


def test_model_is_built_once_and_late() -> None:
    module = CausalLM(TINY)
    assert not list(module.parameters())
    module.configure_model()
    first = module.decoder
    module.configure_model()
    assert module.decoder is first
    assert isinstance(module.configure_optimizers(), torch.optim.AdamW)


def test_schedule_steps_with_the_optimizer() -> None:
    def halves(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    module = CausalLM(TINY, lr_scheduler=halves)
    module.configure_model()
    assert module.configure_optimizers()["lr_scheduler"]["interval"] == "step"
