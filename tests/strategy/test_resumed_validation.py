"""What was due when a checkpoint was made happens in the run that goes on: validation, schedules, early stops."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.testing import GlooPool
from tests.strategy.modules import Plain, samples
from tests.strategy.runs import QUIET

Pools = Callable[[int], GlooPool]


class DrawingLines(IterableDataset):
    """A stream that draws a number for each of four samples."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for sample in samples(4):
            tokens = sample["input_ids"].clone()
            tokens[0] = random.randrange(16)
            yield {"input_ids": tokens, "labels": sample["labels"]}


class Watched(Plain):
    """Logs a metric that gets worse, and writes down what happens with which learning rate."""

    def __init__(self, monitor: str, frequency: int) -> None:
        super().__init__(dropout=0.3)
        self.monitor, self.frequency = monitor, frequency
        self.events: list[tuple[str, int, float]] = []

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        loss = super().training_step(batch)
        self.log("rising", float(self.trainer.global_step), on_step=False, on_epoch=True, batch_size=1)
        (group,) = self.optimizers().param_groups  # type: ignore[union-attr]
        self.events.append((f"step at {group['lr']}", self.trainer.global_step, float(loss.detach())))
        return loss

    def validation_step(self, batch: dict[str, Any]) -> None:
        self.events.append(("validation", self.trainer.global_step, float(torch.rand(()))))
        self.log("val", 1.0 + self.trainer.global_step, batch_size=1)

    def on_train_epoch_end(self) -> None:
        self.events.append(("epoch", self.current_epoch, 0.0))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        config = {"scheduler": schedule, "monitor": self.monitor, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Saves(ModelCheckpoint):
    """Also says how much had happened when it saved."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, "{step}", save_top_k=-1, **options)
        self.saved: list[tuple[Path, int]] = []

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.saved.append((Path(filepath), len(trainer.lightning_module.events)))  # type: ignore[attr-defined,arg-type]


@dataclass(frozen=True)
class Case:
    """When checkpoints are made, and what goes by the metric; four batches make an epoch."""

    saves: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    stops: bool = False
    stream: bool = False
    monitor: str = "val"
    frequency: int = 1


def train(case: Case, saves: Saves, resume: Path | None) -> tuple[list[Any], list[Tensor]]:
    torch.manual_seed(0 if resume is None else 1)
    random.seed(0 if resume is None else 1)
    callbacks: list[Callback] = [saves, *([EarlyStopping("val", patience=2)] if case.stops else [])]
    options: dict[str, Any] = QUIET | {"max_epochs": 3, "enable_checkpointing": True} | case.options
    trainer = Trainer(strategy=LongContextStrategy(), devices=1, callbacks=callbacks, num_sanity_val_steps=0, **options)
    module = Watched(case.monitor, case.frequency)
    data: Any = DrawingLines() if case.stream else samples(4)
    trainer.fit(module, DataLoader(data), DataLoader(samples(1)), ckpt_path=resume)  # type: ignore[arg-type]
    return module.events, [parameter.detach().clone() for parameter in module.parameters()]


def compare(case: Case, folder: Path) -> int:
    saves = Saves(folder / "whole", **case.saves)
    whole, end = train(case, saves, None)
    assert any(event.startswith("step at 0.05") for event, *_ in whole)
    for path, done in saves.saved:
        rest, other_end = train(case, Saves(folder / f"from {path.stem}", **case.saves), path)
        assert rest == whole[done:], path.name
        assert all(torch.equal(one, other) for one, other in zip(end, other_end, strict=True)), path.name
    return len(saves.saved)


CASES = {
    "inside epochs": (Case({"every_n_train_steps": 2}, {"val_check_interval": 2}), 6),
    "after the last batch": (Case({"every_n_train_steps": 4}), 3),
    "where a run is stopped early": (Case({"every_n_train_steps": 4}, {"max_epochs": 4}, stops=True), 3),
    "at the end of epochs": (Case({}), 3),
    "at the end of epochs, by a mean": (Case({}, monitor="rising"), 3),
    "every other epoch": (Case({}, {"max_epochs": 5}, frequency=2), 5),
    "in validation": (Case({"save_on_train_epoch_end": False}, stops=True), 3),
    "a stream": (Case({"every_n_train_steps": 4}, stream=True), 3),
}
"""With how many checkpoints they make."""


@pytest.mark.parametrize("name", CASES)
def test_what_was_due_is_done(gloo: Pools, tmp_path: Path, name: str) -> None:
    case, count = CASES[name]
    assert gloo(1).run(compare, case, tmp_path) == [count]


def warnings_of(case: Case, folder: Path) -> tuple[list[Any], list[str]]:
    saves = Saves(folder / "whole", **case.saves)
    train(case, saves, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest, _ = train(case, Saves(folder / "rest"), saves.saved[0][0])
    return rest, [str(warning.message) for warning in caught if "ReduceLROnPlateau" in str(warning.message)]


@pytest.mark.parametrize(("steps", "message"), [(3, "the mean over the batches from here on"), (4, "takes no step")])
def test_a_mean_over_an_epoch_is_not_in_a_checkpoint_inside_it(
    gloo: Pools, tmp_path: Path, steps: int, message: str
) -> None:
    case = Case({"every_n_train_steps": steps}, {"max_epochs": 2}, monitor="rising")
    [(rest, [warning])] = gloo(1).run(warnings_of, case, tmp_path)
    assert "monitors 'rising'" in warning and "of epoch 0" in warning and message in warning
    assert [event for event, *_ in rest].count("epoch") == 2
