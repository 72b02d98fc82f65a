"""Saves at once and in the background: what is there is whole, and a failure is everybody's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_longctx.models import atomic
from lightning_longctx.models.atomic import DRAFTS
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.checkpoints import saving
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees
from tests.strategy.modules import Plain, loader
from tests.strategy.runs import QUIET, weights
from tests.strategy.test_checkpoints import WithState

Pools = Callable[[int], GlooPool]
BOTH = pytest.mark.parametrize("in_background", [True, False])


class Scored(WithState):
    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        self.log("score", 1.0)
        return super().training_step(batch)


def fit(callbacks: list[Callback], steps: int, *, resume: Path | None = None, **options: Any) -> Plain:
    torch.manual_seed(7)
    module, world = Scored(), dist.get_world_size()
    strategy = LongContextStrategy(Degrees(context=world), sharding="fsdp", **options)
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    quiet = QUIET | {"enable_checkpointing": keeps}
    trainer = Trainer(strategy=strategy, devices=world, max_steps=steps, callbacks=callbacks, **quiet)  # type: ignore[arg-type]
    trainer.fit(module, loader(steps), ckpt_path=resume)
    return module


class Slow:
    """``dcp.save`` that takes its time, or raises instead of writing."""

    def __init__(self, seconds: float = 0.0, error: BaseException | None = None) -> None:
        self.seconds, self.error, self.calls = seconds, error, 0
        self.save = saving.dcp.save

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return self.save(*args, **kwargs)

    def __enter__(self) -> Slow:
        saving.dcp.save = self
        return self

    def __exit__(self, *_: object) -> None:
        saving.dcp.save = self.save


class Watches(Callback):
    """Which checkpoints are whole after every batch. In the background a save may only go on after the next batch."""

    def __init__(self, folder: Path, in_background: bool) -> None:
        self.folder = folder
        self.seen: list[list[str]] = []
        self.calls = 0
        self.gates = [threading.Event() for _ in range(3 if in_background else 0)]

    def save(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        assert not self.gates or self.gates[self.calls - 1].wait(60)
        return saving.dcp.state_dict_saver.save(*args, **kwargs)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        found = [path for path in self.folder.glob("*") if path.name != DRAFTS]
        assert all((path / "meta.pt").is_file() and (path / ".metadata").is_file() for path in found)
        self.seen.append(sorted(path.name for path in found))
        for gate in self.gates[: len(self.seen) - 1]:
            gate.set()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        for gate in self.gates:
            gate.set()


def train_on(folder: Path, in_background: bool) -> tuple[list[list[str]], str]:
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1)
    watches, save = Watches(folder, in_background), saving.dcp.save
    saving.dcp.save = watches.save
    try:
        fit([watches, keep], 3, async_checkpoint=in_background)
    finally:
        saving.dcp.save = save
    return watches.seen, Path(keep.best_model_path).name


@BOTH
def test_training_goes_on_and_one_checkpoint_is_always_there(gloo: Pools, tmp_path: Path, in_background: bool) -> None:
    seen, best = gloo(2).run(train_on, tmp_path, in_background)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step=3.ckpt"] == [best]
    # Batch 2 ends while the first checkpoint is being written; saving the second waits for the first.
    assert seen == ([[], [], ["step=1.ckpt"]] if in_background else [[], ["step=1.ckpt"], ["step=2.ckpt"]])


class SavesOnce(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)
            self.state = weights(module)


def what_is_saved(path: Path, distributed: bool) -> bool:
    """Whether the checkpoint has the weights of when it was saved, although training went on meanwhile."""
    saves = SavesOnce(path)
    begin, write = saving._write, lambda *args: (time.sleep(0.3), begin(*args))
    saving._write = write  # type: ignore[assignment]
    try:
        fit([saves], 3, async_checkpoint=True, save_distributed_checkpoint=distributed)
    finally:
        saving._write = begin
    loaded = weights(fit([], 1, resume=path))
    return all(torch.equal(loaded[name], value) for name, value in saves.state.items())


@pytest.mark.parametrize("distributed", [True, False])
def test_what_was_there_is_saved_and_not_what_came_of_it(gloo: Pools, tmp_path: Path, distributed: bool) -> None:
    assert all(gloo(2).run(what_is_saved, tmp_path / "some.ckpt", distributed))
    assert (tmp_path / "some.ckpt").is_dir() == distributed


def fails(path: Path, in_background: bool, where: str) -> tuple[str, int]:
    """The error of a second save, and the step of what is there then."""
    fit([SavesOnce(path)], 1)
    message, rank = "", dist.get_rank()
    error = OSError(28, "No space left on device") if rank == 1 else None
    put, writer = atomic.replace, saving.dcp.FileSystemWriter.write_data
    if where == "renaming" and rank == 0:
        atomic.replace = lambda new, place: os.rename(new / "nothing", place)
    if where == "writing" and error is not None:
        saving.dcp.FileSystemWriter.write_data = lambda *_: (_ for _ in ()).throw(error)  # type: ignore
    try:
        if where == "beginning" and rank == 0:
            path.with_name(DRAFTS).write_text("in the way")
        fit([SavesOnce(path)], 2, async_checkpoint=in_background)
    except RuntimeError as problem:
        message = str(problem)
    finally:
        atomic.replace, saving.dcp.FileSystemWriter.write_data = put, writer
    dist.barrier()
    return message, torch.load(path / "meta.pt", weights_only=True)["global_step"]


REASONS = {
    "writing": "rank 0: OSError on rank 1: [Errno 28] No space left on device; rank 1: OSError on rank 1: [Errno 28]",
    "renaming": "(rank 0: FileNotFoundError: ",
    "beginning": "(rank 0: FileExistsError: ",
}


@BOTH
@pytest.mark.parametrize("where", REASONS)
def test_a_failed_save_is_an_error_on_every_rank(gloo: Pools, tmp_path: Path, where: str, in_background: bool) -> None:
    path = tmp_path / "last.ckpt"
    results = gloo(2).run(fails, path, in_background, where)
    assert results[0] == results[1]
    message, step = results[0]
    assert f"saving the checkpoint {path} failed (" in message and REASONS[where] in message
    assert "What was saved before is still there." in message and step == 1
    left = [DRAFTS] * (where == "beginning") + ["last.ckpt"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == left


class Breaks(Callback):
    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        if index == 1:
            raise ZeroDivisionError


def ends_with_an_error(path: Path) -> str:
    with Slow(0.3):
        try:
            fit([SavesOnce(path), Breaks()], 3, async_checkpoint=True)
        except ZeroDivisionError as problem:
            return repr(problem)
    return ""


def test_an_error_lets_a_save_in_the_background_end(gloo: Pools, tmp_path: Path) -> None:
    assert gloo(2).run(ends_with_an_error, tmp_path / "last.ckpt") == ["ZeroDivisionError()"] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def names_that_repeat(folder: Path) -> list[str]:
    keep = ModelCheckpoint(folder, filename="same", monitor="score", every_n_train_steps=1, save_top_k=3)
    with Slow(0.2):
        fit([keep], 3, async_checkpoint=True)
    return sorted(path.name for path in folder.iterdir())


def test_a_name_is_taken_while_its_checkpoint_is_written(gloo: Pools, tmp_path: Path) -> None:
    expected = ["same-v1.ckpt", "same-v2.ckpt", "same.ckpt"]
    assert gloo(2).run(names_that_repeat, tmp_path) == [expected] * 2


def refused(kind: str, path: Path) -> str:
    try:
        if kind == "link":
            fit([ModelCheckpoint(path, save_last="link")], 1, async_checkpoint=True)
        elif kind == "storage":
            fit([SavesOnce("s3://bucket/last.ckpt")], 1)  # type: ignore[arg-type]
        elif kind == "missing":
            fit([], 1, resume=path / "nothing.ckpt")
        else:
            some = path / "rank-1.ckpt"
            fit([SavesOnce(some)], 1)
            fit([], 2, resume=some if dist.get_rank() == 1 else None)
    except ValueError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("link", "async_checkpoint=True with ModelCheckpoint(save_last='link'): the link would be there before"),
        ("storage", "save_checkpoint('s3://bucket/last.ckpt', storage_options=None): LongContextStrategy writes to"),
        ("missing", "nothing.ckpt is no checkpoint: it is not there. Give the directory or file that was saved."),
        ("one rank", "rank-1.ckpt, but ranks [0] found no checkpoint: ckpt_path='last' looks into the folder on every"),
    ],
)
def test_refusals(gloo: Pools, tmp_path: Path, kind: str, message: str) -> None:
    results = gloo(2).run(refused, kind, tmp_path)
    assert message in results[0] and results[0] == results[1]


def test_another_writer_of_checkpoints_is_refused() -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    saves = saving.Saves(False, timedelta(seconds=1))
    trainer = Trainer(**QUIET)  # type: ignore[arg-type]
    from lightning_longctx.strategy.checkpoints.save_options import check_callbacks

    with pytest.raises(ValueError, match=r"plugins=\[AsyncCheckpointIO\(\)\] would not be used"):
        check_callbacks(trainer, saves, AsyncCheckpointIO())
