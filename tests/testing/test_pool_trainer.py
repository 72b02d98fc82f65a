"""A Lightning Trainer runs inside a pool, launches nothing, and uses the pool's process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_longctx.testing import FLOAT32, GlooPool, assert_close_relative

STEPS = 3


class Quiet(BoringModel):
    """Mean loss over the batch, SGD; the same weights everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(32, 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples() -> RandomDataset:
    torch.manual_seed(2)
    return RandomDataset(32, 4 * STEPS)


def fit(directory: str) -> tuple[int, int, int, torch.Tensor]:
    dist_group = dist.group.WORLD
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=directory,
    )
    model = Quiet()
    share = torch.utils.data.Subset(samples(), range(dist.get_rank(), 4 * STEPS, 2))
    trainer.fit(model, DataLoader(share, batch_size=2, num_workers=1), DataLoader(share, batch_size=2))
    assert dist.group.WORLD is dist_group
    return trainer.world_size, trainer.global_step, os.getpid(), model.layer.weight.detach()


def expected_weight() -> torch.Tensor:
    model, data = Quiet(), samples()
    optimizer = model.configure_optimizers()
    for step in range(STEPS):
        optimizer.zero_grad()
        model.loss(model(torch.stack([data[4 * step + row] for row in range(4)]))).backward()
        optimizer.step()
    return model.layer.weight.detach()


def test_ddp_trainer_equals_one_process(gloo: Callable[[int], GlooPool], tmp_path: Path) -> None:
    pool = gloo(2)
    for _ in range(2):  # the second Trainer finds the process as the first did
        for world_size, steps, pid, weight in pool.run(fit, str(tmp_path)):
            assert (world_size, steps) == (2, STEPS) and pid in pool.pids
            assert_close_relative(weight, expected_weight(), "weight", FLOAT32)
