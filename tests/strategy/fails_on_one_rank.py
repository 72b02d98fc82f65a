"""A program whose second rank fails; run by the tests with one command, as a user would."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.topology import Degrees
from tests.strategy.modules import Plain, samples
from tests.strategy.runs import QUIET

MESSAGE = "the second rank has had enough"


class FailsInStep(Plain):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.failing = rank

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        if self.global_rank == self.failing and self.trainer.global_step == 1:
            raise ValueError(MESSAGE)
        return super().training_step(batch)


class FailsInWorker(torch.utils.data.Dataset):
    """Fails where it runs on the given rank."""

    def __init__(self, rank: int) -> None:
        self.failing = rank
        self.samples = samples(6)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 1 and torch.distributed.get_rank() == self.failing:
            raise ValueError(MESSAGE)
        return self.samples[index]


def main(where: str, rank: int) -> None:
    module: LightningModule = FailsInStep(rank) if where == "step" else Plain()
    dataset: Any = samples(6) if where == "step" else FailsInWorker(rank)
    workers = 1 if where == "worker" else 0
    strategy = LongContextStrategy(Degrees(context=2))
    trainer = Trainer(strategy=strategy, devices=2, max_epochs=1, **QUIET)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(dataset, batch_size=1, num_workers=workers))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
