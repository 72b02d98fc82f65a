"""What TensorBoard shows of a run that was resumed: one point per optimizer step, on one axis, by one writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees
from lightning_longctx.loss import token_cross_entropy
from tests.cases.tiny import SGD, TINY, data_rank, make_trainer, samples

ACCUMULATE = 2


class Noting(CausalLM):
    """Notes loss sums and counts of this rank's tokens, micro-batch by micro-batch."""

    def __init__(self) -> None:
        super().__init__(TINY, optimizer=SGD)
        self.noted: list[tuple[float, int]] = []

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            total, count = token_cross_entropy(self(batch), batch["shift_labels"])
        self.noted.append((total.item(), int(count)))
        return super().training_step(batch)


class SavesAt(Callback):
    """Writes a checkpoint after an optimizer step."""

    def __init__(self, step: int, path: Path | None) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if trainer.global_step == self.step and (index + 1) % ACCUMULATE == 0 and self.path is not None:
            trainer.save_checkpoint(self.path)


def fit(
    folder: Path, degrees: Degrees, num_samples: int, until: dict[str, int], resume: Path | None, save: Path | None
) -> list[tuple[float, int]]:
    """Train; checkpoint after two steps."""
    rank, num_ranks = data_rank(degrees)
    torch.manual_seed(0)
    module = Noting()
    trainer = make_trainer(
        degrees,
        accumulate_grad_batches=ACCUMULATE,
        logger=TensorBoardLogger(folder, name="", version=""),
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        callbacks=[SavesAt(2, save)],
        **until,
    )
    training = DataLoader(samples(num_samples * num_ranks)[rank::num_ranks], batch_size=1)
    trainer.fit(module, training, DataLoader(samples(2, seed=1)), ckpt_path=resume)  # type: ignore[arg-type]
    return module.noted


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder), purge_orphaned_data=False)
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(name)]


def writers(folder: Path) -> int:
    return len(list(folder.glob("events*")))


def window_means(by_rank: list[list[tuple[float, int]]]) -> list[float]:
    """Token-weighted means over ranks and windows."""
    means = []
    for start in range(0, len(by_rank[0]), ACCUMULATE):
        window = [pair for noted in by_rank for pair in noted[start : start + ACCUMULATE]]
        means.append(sum(total for total, _ in window) / sum(count for _, count in window))
    return means


@pytest.mark.parametrize(("num_ranks", "degrees"), [(2, Degrees(context=2)), (4, Degrees(context=2))])
@pytest.mark.parametrize(
    ("num_samples", "first", "then"),
    [(4, dict(max_epochs=1), dict(max_epochs=2)), (8, dict(max_steps=2), dict(max_epochs=1))],
    ids=["after an epoch", "inside an epoch"],
)
def test_a_resumed_curve_goes_on(
    gloo: Any, tmp_path: Path, num_ranks: int, degrees: Degrees, num_samples: int, first: Any, then: Any
) -> None:
    """B55: 8 micro-batches in windows of two, resumed in the middle."""
    folder, saved = tmp_path / "logs", tmp_path / "half.ckpt"
    pool = gloo(num_ranks)
    before = pool.run(fit, folder, degrees, num_samples, first, None, saved)
    assert writers(folder) == 1
    after = pool.run(fit, folder, degrees, num_samples, then, saved, None)
    assert writers(folder) == 2, "one more for the second process"
    points = curve(folder, "train_loss")
    assert [step for step, _ in points] in ([0, 1, 2, 3], [1, 2, 3, 4])
    noted = [one + other for one, other in zip(before, after, strict=True)]
    assert len(noted[0]) == 8
    assert [value for _, value in points] == pytest.approx(window_means(noted), rel=1e-5)


@pytest.mark.parametrize("degrees", [Degrees(context=2), Degrees()])
def test_a_resumed_curve_is_that_of_a_run_that_never_stopped(gloo: Any, tmp_path: Path, degrees: Degrees) -> None:
    """B55: points of training and of validation, at the same steps with the same values.

    The checkpoint comes before the validation of its epoch: the first run goes on to it, the resumed one makes it up.
    """
    saved = tmp_path / "half.ckpt"
    pool = gloo(2)
    pool.run(fit, tmp_path / "parts", degrees, 4, dict(max_epochs=1), None, saved)
    pool.run(fit, tmp_path / "parts", degrees, 4, dict(max_epochs=2), saved, None)
    pool.run(fit, tmp_path / "whole", degrees, 4, dict(max_epochs=2), None, None)
    for name in ("train_loss", "val_loss", "val_perplexity"):
        parts, whole = curve(tmp_path / "parts", name), curve(tmp_path / "whole", name)
        again = [] if name == "train_loss" else whole[:1]
        assert [step for step, _ in parts] == [step for step, _ in again + whole]
        assert [value for _, value in parts] == pytest.approx([value for _, value in again + whole], rel=1e-5)
    assert len(curve(tmp_path / "whole", "val_loss")) == 2
