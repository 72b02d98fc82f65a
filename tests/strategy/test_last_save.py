"""A checkpoint on an error: written if all ranks have the error, else given up soon, with the error that was there."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_longctx import Degrees, LongContextStrategy
from lightning_longctx.testing import GlooPool, RankError
from tests.cases.tiny import QUIET, samples, tiny_module

Pools = Callable[[int], GlooPool]
MESSAGE = "this batch is wrong"


class Raises(Callback):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank in self.ranks:
            raise ValueError(MESSAGE)


def fail(ranks: tuple[int, ...], folder: Path) -> str:
    """The error of this rank, as it is shown; where some have none of their own the world is spent."""
    strategy = LongContextStrategy(Degrees(context=2), sharding="fsdp", timeout=timedelta(seconds=10))
    savers = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, "saved", save_on_exception=True)]
    options: dict[str, Any] = QUIET | dict(enable_checkpointing=True)
    trainer = Trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[Raises(ranks), *savers], **options)
    begun = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        trainer.fit(tiny_module(), DataLoader(samples(4)))  # type: ignore[arg-type]
    assert time.monotonic() < begun + 40
    told = "".join(traceback.format_exception_only(caught.value))
    (folder / str(dist.get_rank())).write_text(told)
    if ranks != (0, 1):
        raise RuntimeError("no call is to follow in this world") from caught.value
    return told


def test_an_error_of_all_ranks_is_saved(gloo: Pools, tmp_path: Path) -> None:
    told = gloo(2).run(fail, (0, 1), tmp_path)
    assert [text.splitlines() for text in told] == [
        [f"ValueError: {MESSAGE}", f"(on rank {rank} of 2)"] for rank in range(2)
    ]
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"on_exception.ckpt", "saved.ckpt"}


@pytest.mark.slow
def test_an_error_of_one_rank_is_not(gloo: Pools, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="no call is to follow"):
        gloo(2).run(fail, (1,), tmp_path)
    told = (tmp_path / "1").read_text()
    assert told.startswith(f"ValueError: {MESSAGE}\n") and "no checkpoint was written for this error" in told
    assert not list(tmp_path.glob("*.ckpt"))
