"""How long a run is, in optimizer steps: samples over data ranks, whatever else the processes share."""

from __future__ import annotations

import math
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees
from tests.cases.tiny import LEARNING_RATE, SGD, TINY, make_trainer, samples


class Decaying(CausalLM):
    """Learning rate to zero over the steps that the Trainer estimates."""

    def configure_optimizers(self) -> Any:
        self.estimated = int(self.trainer.estimated_stepping_batches)
        self._make_lr_scheduler = lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / self.estimated)
        return super().configure_optimizers()


class Rates(Callback):
    def __init__(self) -> None:
        self.after: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if len(self.after) < trainer.global_step:
            self.after.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(degrees: Degrees, num_samples: int, accumulate: int, epochs: int) -> tuple[int, int, list[float]]:
    """Estimated and taken steps, and the learning rate after each."""
    module, rates = Decaying(TINY, optimizer=SGD), Rates()
    options = dict(accumulate_grad_batches=accumulate, max_epochs=epochs, use_distributed_sampler=True)
    trainer = make_trainer(degrees, callbacks=[rates], **options)
    trainer.fit(module, DataLoader(samples(num_samples), batch_size=1))  # type: ignore[arg-type]
    return module.estimated, trainer.global_step, rates.after


@pytest.mark.parametrize(
    ("degrees", "data_ranks"), [(Degrees(data=2, context=2), 2), (Degrees(context=4, inner_ring=2), 1), (Degrees(), 4)]
)
@pytest.mark.parametrize(("num_samples", "accumulate", "epochs"), [(14, 3, 2), (8, 2, 1)])
def test_steps_follow_the_data_ranks(
    gloo: Any, degrees: Degrees, data_ranks: int, num_samples: int, accumulate: int, epochs: int
) -> None:
    """B47: also with windows that do not divide an epoch, and several epochs."""
    num_steps = epochs * math.ceil(math.ceil(num_samples / data_ranks) / accumulate)
    expected = [LEARNING_RATE * (1 - step / num_steps) for step in range(1, num_steps + 1)]
    for estimated, taken, rates in gloo(4).run(fit, degrees, num_samples, accumulate, epochs):
        assert (estimated, taken) == (num_steps, num_steps)
        assert rates == pytest.approx(expected, abs=1e-9)
        assert rates[-1] == 0
