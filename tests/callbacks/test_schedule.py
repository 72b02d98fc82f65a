"""The length of a run, and so of its schedule, follows the data ranks and not the number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR

from lightning_longctx import Degrees
from lightning_longctx.callbacks import LearningRate
from tests.callbacks.tiny import Tiny, curves, fit


class Decaying(Tiny):
    """Decays its learning rate linearly to zero over the steps that the Trainer estimates."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.estimated = int(self.trainer.estimated_stepping_batches)
        schedule = LambdaLR(optimizer, lambda step: 1 - step / self.estimated)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rates(Callback):
    """Learning rate after every optimizer step."""

    def __init__(self) -> None:
        self.after: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if len(self.after) < trainer.global_step:
            self.after.append(trainer.optimizers[0].param_groups[0]["lr"])


def run_schedule(folder: str, degrees: Degrees) -> tuple[int, int, list[float]]:
    module, rates = Decaying(), Rates()
    trainer = fit(
        folder,
        degrees,
        64,
        [LearningRate(), rates],
        module=module,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        max_epochs=1,
    )
    return module.estimated, trainer.global_step, rates.after


def test_two_data_ranks_of_two_context_ranks_take_a_quarter_of_the_samples_as_steps(tmp_path: Path, gloo: Any) -> None:
    expected = [0.1 * (1 - step / 16) for step in range(1, 17)]
    for estimated, num_steps, rates in gloo(4).run(run_schedule, str(tmp_path), Degrees(context=2)):
        assert (estimated, num_steps) == (16, 16)
        assert rates == pytest.approx(expected, abs=1e-12) and rates[-1] == 0
    (curve,) = (points for name, points in curves(tmp_path).items() if name.startswith("lr"))
    assert [step for step, _ in curve] == list(range(16))
    assert [value for _, value in curve] == pytest.approx([0.1, *expected[:-1]])
