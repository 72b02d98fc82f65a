"""SIGTERM and SLURM's requeue signal, to any rank: all stop between the same two steps, saved as Lightning users know.

Processes of a pool send the signals to themselves, so that the moment is known; ``test_survival`` sends them from
outside.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_longctx import Degrees
from lightning_longctx.strategy.failure.signals import requeue_command, requeue_job
from lightning_longctx.strategy.failure.watch import STOPPED
from lightning_longctx.testing import GlooPool
from tests.cases.tiny import make_trainer, named_weights, samples, tiny_module

Pools = Callable[[int], GlooPool]
JOB = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0"}


class Interrupts(Callback):
    """Signals its own process, on some ranks, in the middle of one batch; notes what the run then did."""

    def __init__(self, number: signal.Signals, ranks: tuple[int, ...], batch: int, evaluation: bool = False) -> None:
        self.number, self.ranks, self.batch, self.evaluation = number, ranks, batch, evaluation
        self.saw: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.interrupt(trainer, batch_idx, evaluation=False)

    def on_validation_batch_start(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.interrupt(trainer, args[1], evaluation=True)

    def interrupt(self, trainer: Trainer, batch: int, evaluation: bool) -> None:
        if trainer.global_rank in self.ranks and batch == self.batch and evaluation == self.evaluation:
            os.kill(os.getpid(), self.number)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self.saw.append((type(exception).__name__, trainer.received_sigterm))


def stopped(
    ranks: tuple[int, ...], batch: int, accumulate: int, folder: Path, evaluation: bool = False
) -> tuple[int, int | str | None, list[Any]]:
    """Steps until SIGTERM, exit code, and what callbacks saw; checkpoints of both kinds were asked for."""
    interrupts = Interrupts(signal.SIGTERM, ranks, batch, evaluation)
    savers = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, "saved-{step}", save_on_exception=True)]
    options: dict[str, Any] = dict(
        accumulate_grad_batches=accumulate, default_root_dir=folder, enable_checkpointing=True
    )
    trainer = make_trainer(Degrees(context=2), callbacks=[interrupts, *savers], max_epochs=2, **options)
    training, validation = (DataLoader(samples(count)) for count in (8, 4))  # type: ignore[arg-type]
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(tiny_module(), training, validation if evaluation else None)
    return trainer.global_step, caught.value.code, interrupts.saw


@pytest.mark.parametrize(
    ("ranks", "batch", "accumulate", "steps"), [((1,), 2, 1, 3), ((0,), 3, 3, 2), ((0, 1), 7, 1, 8)]
)
def test_all_ranks_stop_before_the_same_step(
    gloo: Pools, tmp_path: Path, ranks: tuple[int, ...], batch: int, accumulate: int, steps: int
) -> None:
    """A window of accumulation is completed, and the last batch of an epoch leads to the first of the next."""
    results = gloo(2).run(stopped, ranks, batch, accumulate, tmp_path)
    assert results == [(steps, STOPPED, [("SIGTERMException", True)])] * 2
    saved = {path.name for path in tmp_path.iterdir()}
    assert {"on_exception.ckpt", f"saved-step={steps}.ckpt"} <= saved


def test_a_validation_is_broken_off(gloo: Pools, tmp_path: Path) -> None:
    results = gloo(2).run(stopped, (1,), 1, 1, tmp_path, evaluation=True)
    assert results == [(8, STOPPED, [("SIGTERMException", True)])] * 2


class KillsWorkers(Callback):
    """Sends SIGTERM to its rank and, from a process of its own, to the workers of its loader."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            workers = [str(worker.pid) for worker in multiprocessing.active_children()]
            assert len(workers) == 2
            subprocess.run(["kill", "-TERM", *workers], check=True)
            time.sleep(0.2)  # PyTorch would raise by now
            os.kill(os.getpid(), signal.SIGTERM)


def stopped_with_workers() -> tuple[int, list[bool]]:
    """Steps until SIGTERM, and whether workers live on after they were told to end."""
    trainer = make_trainer(Degrees(context=2), callbacks=[KillsWorkers()])
    loader = DataLoader(samples(8), num_workers=2, prefetch_factor=1)  # type: ignore[arg-type]
    with pytest.raises(SIGTERMException):
        trainer.fit(tiny_module(), loader)
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.terminate()
        worker.join(10)
    return trainer.global_step, [worker.is_alive() for worker in workers]


def test_workers_of_loaders_go_on_until_all_stop(gloo: Pools) -> None:
    assert [steps for steps, alive in gloo(2).run(stopped_with_workers) if not any(alive)] == [2, 2]


@contextmanager
def slurm(folder: Path, requeues: bool) -> Any:
    """What a task of a SLURM job finds, with a ``scontrol`` that writes down how it was called."""
    before, program = dict(os.environ), folder / "scontrol"
    rank = str(dist.get_rank())
    if rank == "0":
        program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexit {0 if requeues else 1}\n')
        program.chmod(0o755)
    os.environ |= JOB | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "PATH": f"{folder}:{os.environ['PATH']}"}
    os.environ["SLURM_NTASKS"] = os.environ["SLURM_NTASKS_PER_NODE"] = str(dist.get_world_size())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_of_job(folder: Path, degrees: Degrees, interrupts: Callback | None, requeues: bool = True) -> tuple[int, Any]:
    """Steps, and weights of a run of two epochs that ends, or its exit code."""
    with slurm(folder, requeues):
        root = folder / "run"
        root.mkdir(exist_ok=True)
        trainer = make_trainer(
            degrees, callbacks=[interrupts] if interrupts else [], max_epochs=2, default_root_dir=root,
            plugins=[SLURMEnvironment(auto_requeue=True)],
        )  # fmt: skip
        module = tiny_module()
        try:
            trainer.fit(module, DataLoader(samples(4)))  # type: ignore[arg-type]
        except SIGTERMException as stop:
            return trainer.global_step, stop.code
        return trainer.global_step, named_weights(module)


@pytest.mark.parametrize(("ranks", "batch"), [((1,), 3), ((0, 1), 1)])
def test_a_job_is_saved_requeued_and_continued(gloo: Pools, tmp_path: Path, ranks: tuple[int, ...], batch: int) -> None:
    whole = gloo(2).run(run_of_job, tmp_path, Degrees(context=2), None)
    assert [steps for steps, _ in whole] == [8, 8] and not any((tmp_path / "run").iterdir())
    signalled = gloo(2).run(run_of_job, tmp_path, Degrees(context=2), Interrupts(signal.SIGUSR1, ranks, batch))
    assert signalled == [(batch + 1, STOPPED)] * 2
    assert (tmp_path / "calls").read_text().split() == ["requeue", "4711"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["hpc_ckpt_1.ckpt"]
    again = gloo(2).run(run_of_job, tmp_path, Degrees(context=2), None)
    assert [steps for steps, _ in again] == [8, 8]
    for name, weight in whole[0][1].items():
        assert torch.equal(again[0][1][name], weight), name


def test_a_run_goes_on_where_slurm_refuses(gloo: Pools, tmp_path: Path) -> None:
    interrupts = Interrupts(signal.SIGUSR1, (1,), 2)
    results = gloo(2).run(run_of_job, tmp_path, Degrees(context=2), interrupts, requeues=False)
    assert [steps for steps, _ in results] == [8, 8]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"}


def test_one_process_saves_between_steps_too(gloo: Pools, tmp_path: Path) -> None:
    """Lightning's handler saves within one, in the middle of whatever the process was doing."""
    result = gloo(1).run(run_of_job, tmp_path, Degrees(), Interrupts(signal.SIGUSR1, (0,), 1))
    assert result == [(2, STOPPED)]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["hpc_ckpt_1.ckpt"]


def test_which_job_is_requeued() -> None:
    assert requeue_command({"SLURM_JOB_ID": "12"}) == ["scontrol", "requeue", "12"]
    array = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2"}
    assert requeue_command(array) == ["scontrol", "requeue", "12_2"]
    with pytest.raises(ValueError, match="name no job to requeue: '; reboot'"):
        requeue_command({"SLURM_JOB_ID": "; reboot"})


def test_why_a_job_was_not_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requeue_job({}) == "SLURM's variables name no job to requeue: ''"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requeue_job({"SLURM_JOB_ID": "12"}) == "`scontrol requeue 12`: there is no such program"
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho no job 12 >&2\nexit 3\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert requeue_job({"SLURM_JOB_ID": "12"}) == "`scontrol requeue 12` says no job 12"
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 0\n")
    assert requeue_job({"SLURM_JOB_ID": "12"}) == ""
