"""What TensorBoard shows: one writer, one point per optimizer step, going on after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_longctx.mixins import CausalLM
from lightning_longctx.testing import FLOAT32, GlooPool
from lightning_longctx.topology import Degrees
from tests.mixins.modules import SGD, TINY, make_trainer, share
from tests.mixins.test_causal_lm import by_hand

Pools = Callable[[int], GlooPool]


def train(directory: Path, max_steps: int, resume: bool) -> None:
    degrees, path = Degrees(context=2), directory / "last.ckpt"
    torch.manual_seed(3)
    trainer = make_trainer(
        degrees,
        accumulate_grad_batches=2,
        max_epochs=-1,
        max_steps=max_steps,
        log_every_n_steps=1,
        logger=TensorBoardLogger(directory, name="", version="run"),
    )
    trainer.fit(CausalLM(TINY, optimizer=SGD), share(8, degrees), ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)


def test_one_point_per_step(gloo: Pools, tmp_path: Path) -> None:
    gloo(2).run(train, tmp_path, 4, False)
    assert len(list((tmp_path / "run").glob("events.*"))) == 1
    gloo(2).run(train, tmp_path, 6, True)
    assert len(list((tmp_path / "run").glob("events.*"))) == 2
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    points = events.Scalars("train_loss")
    assert [point.step for point in points] == list(range(6))
    # The checkpoint ends an epoch, so the fifth step sees the first two samples again.
    assert [point.value for point in points[:4]] == pytest.approx(by_hand(2)[0], rel=FLOAT32)
