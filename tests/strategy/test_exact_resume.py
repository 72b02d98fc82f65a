"""A resumed run is the uninterrupted one, to the bit: losses, weights, moments, schedules and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees
from tests.strategy.modules import Plain, samples
from tests.strategy.runs import QUIET

Pools = Callable[[int], GlooPool]
NUM_BATCHES = 3


class Transformed(Dataset):
    """Draws from all generators whenever a sample is read."""

    def __init__(self, num_samples: int) -> None:
        self.samples = samples(num_samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.samples[index]["input_ids"].clone()
        tokens[int(torch.randint(16, ()))] = np.random.randint(32)
        tokens[random.randrange(16)] = 1
        return {"input_ids": tokens, "labels": self.samples[index]["input_ids"]}


class Drawing(Plain):
    """Drops, and draws from all generators in its step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.seen: list[tuple[int, float, float]] = []

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        drawn = random.random() + np.random.rand()  # the same on all ranks
        loss = super().training_step(batch) * (1 + drawn + torch.rand(()) / 8)
        self.seen.append((self.trainer.global_step, float(loss.detach()), drawn))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}]


class SavesAfter(Callback):
    """After some batches of all epochs, and when an epoch has ended."""

    def __init__(self, folder: Path, batches: list[int]) -> None:
        self.folder, self.batches, self.count = folder, batches, 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.count += 1
        if self.count in self.batches:
            trainer.save_checkpoint(self.folder / f"batch-{self.count}.ckpt")

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"epoch-{trainer.current_epoch}.ckpt")


def train(
    degrees: Degrees, resume: Path | None, callbacks: list[Callback], seed: int, options: dict[str, Any]
) -> tuple[list[Any], list[Tensor]]:
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(seed)
    strategy = LongContextStrategy(degrees, **options)
    world = torch.distributed.get_world_size()
    options_of_trainer: dict[str, Any] = QUIET | {"num_sanity_val_steps": 1}
    trainer = Trainer(strategy=strategy, devices=world, max_epochs=3, callbacks=callbacks, **options_of_trainer)
    data = degrees.resolve(world).data
    assert isinstance(data, int)
    module = Drawing()
    loaders = DataLoader(Transformed(data * NUM_BATCHES), shuffle=True), DataLoader(samples(data))  # type: ignore[arg-type]
    trainer.fit(module, *loaders, ckpt_path=resume)
    assert trainer.global_step == 3 * NUM_BATCHES
    (optimizer,) = trainer.optimizers
    (schedule,) = trainer.lr_scheduler_configs
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    tensors = [*module.parameters(), *moments, torch.tensor(schedule.scheduler.get_last_lr())]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    drawn = torch.rand(2), torch.tensor(np.random.rand(2)), torch.tensor([random.random()])
    return module.seen, [*(tensor.detach().clone() for tensor in local), *drawn]


def compare(degrees: Degrees, folder: Path, options: dict[str, Any]) -> None:
    whole, end = train(degrees, None, [SavesAfter(folder, [4, 6])], 1, options)
    assert len({drawn for _, _, drawn in whole}) == len(whole) and len(end) > 20
    for seed, (name, done) in enumerate(CHECKPOINTS.items(), 2):
        resumed, other_end = train(degrees, folder / name, [], seed, options)
        assert resumed == whole[done:], (name, resumed, whole)
        assert all(torch.equal(one, other) for one, other in zip(end, other_end, strict=True)), name


CHECKPOINTS = {"epoch-0.ckpt": NUM_BATCHES, "batch-4.ckpt": 4, "batch-6.ckpt": 6}
"""With how many batches done: at the end of an epoch, inside one, and after its last batch."""

WORLDS = {
    "one process": (1, Degrees(), {}),
    "context": (2, Degrees(context=2), {"sharding": "fsdp", "async_checkpoint": True}),
    "data x context": (4, Degrees(data=2, context=2), {"sharding": "fsdp"}),
    "one file": (2, Degrees(context=2), {"save_distributed_checkpoint": False}),
}


@pytest.mark.parametrize("world", WORLDS)
def test_a_resumed_run_is_the_same_run(gloo: Pools, tmp_path: Path, world: str) -> None:
    num_ranks, degrees, options = WORLDS[world]
    gloo(num_ranks).run(compare, degrees, tmp_path, options)
