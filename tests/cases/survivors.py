"""Worlds of real processes that tests kill from outside; forked from a server that has imported everything once."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, LongContextStrategy
from tests.cases.tiny import QUIET, TINY, named_weights, samples
from tests.launches import launch_environment

NUM_RANKS, TIMEOUT = 4, 20.0
DEGREES = Degrees(data=2, context=2)
EPOCHS, SAMPLES, STEPS_PER_EPOCH, STEPS_PER_SAVE = 4, 12, 6, 2
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH


class Pace(Callback):
    """Lets the test see how far the run is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            with (self.folder / "steps").open("a") as steps:
                steps.write(f"{trainer.global_step}\n")


def train(folder: Path) -> None:
    """Train to the end, from the newest checkpoint if there is one, and leave the weights."""
    saves = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=STEPS_PER_SAVE, save_top_k=-1)
    options: dict[str, Any] = QUIET | dict(enable_checkpointing=True, use_distributed_sampler=True)
    trainer = Trainer(
        strategy=LongContextStrategy(DEGREES, sharding="fsdp", timeout=timedelta(seconds=TIMEOUT)),
        devices=NUM_RANKS,
        max_epochs=EPOCHS,
        callbacks=[Pace(folder), saves],
        **options,
    )
    torch.manual_seed(0)
    module = CausalLM(TINY, optimizer=partial(torch.optim.AdamW, lr=0.01))
    trainer.fit(module, DataLoader(samples(SAMPLES), shuffle=True), ckpt_path=newest(folder))  # type: ignore[arg-type]
    weights = named_weights(module)
    if trainer.is_global_zero:
        torch.save(weights, folder / "weights")


def newest(folder: Path) -> Path | None:
    """The checkpoint of the most steps that is there under its name."""
    saved = (folder / "saved").glob("step=*.ckpt")
    return max(saved, key=step_of, default=None)


def step_of(saved: Path) -> int:
    """Of a checkpoint."""
    return int(saved.stem.removeprefix("step="))


def _rank(environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(folder / f"log{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    train(folder)


@dataclass(frozen=True)
class World:
    """Processes by rank."""

    folder: Path
    processes: list[ForkServerProcess]

    def wait(self, seconds: float) -> list[int | None]:
        """Exit codes after at most so many seconds in all."""
        for process in self.processes:
            process.join(seconds)
        return [process.exitcode for process in self.processes]

    def end(self) -> None:
        """Leave none behind."""
        for process in self.processes:
            process.kill()
            process.join()

    def log(self, rank: int) -> str:
        """What a rank wrote."""
        return (self.folder / f"log{rank}").read_text()

    @property
    def step(self) -> int:
        """The step that rank 0 is in, or was last."""
        written = self.folder / "steps"
        lines = written.read_text().split() if written.exists() else []
        return int(lines[-1]) if lines else -1


def forkserver() -> ForkServerContext:
    """Where worlds come from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def start(context: ForkServerContext, folder: Path) -> World:
    """A world as torchrun would start it; it logs from scratch."""
    for file in (folder / "steps", *folder.glob("log*")):
        file.unlink(missing_ok=True)
    shared = launch_environment(MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(NUM_RANKS))
    places = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"} for rank in range(NUM_RANKS)]
    processes = [context.Process(target=_rank, args=(place, folder)) for place in places]
    for process in processes:
        process.start()
    return World(folder, processes)
