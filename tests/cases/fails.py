"""A module and data that fail on one of two ranks; programs of the tests name them as a user's own."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from lightning_longctx import CausalLM
from tests.cases.tiny import SGD, TINY, samples

MESSAGE = "the second rank cannot go on"
FAILING_RANK, FAILING_STEP = 1, 2  # steps count from 1


class Fails(CausalLM):
    """Fails at the second step of one rank: ``where`` the other one waits for its keys, or for its gradients.

    Args:
        where: Between the ``layers``, or in ``backward``; ``killed`` ends without a word; ``terminated`` gets SIGTERM;
            ``made`` fails as soon as it exists, before the ranks have met.
        rank: Which one.
    """

    def __init__(self, where: str = "", rank: int = FAILING_RANK) -> None:
        super().__init__(TINY, optimizer=SGD)
        self.where, self.rank = where, rank
        if where == "made" and os.environ.get("LOCAL_RANK") == str(rank):
            self.fail()

    def now(self, where: str) -> bool:
        reached = self.trainer.global_step + 1 == FAILING_STEP and self.trainer.training
        return self.where == where and self.global_rank == self.rank and reached

    def fail(self, *_: Any) -> None:
        raise ValueError(MESSAGE)

    def configure_model(self) -> None:
        super().configure_model()
        self.decoder.blocks[1].register_forward_pre_hook(lambda *_: self.fail() if self.now("layers") else None)

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        if self.now("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.now("terminated"):
            os.kill(os.getpid(), signal.SIGTERM)
        loss = super().training_step(batch)
        if self.now("backward"):
            self.hook = self.decoder.blocks[0].register_full_backward_pre_hook(self.fail)
        return loss


def failing_collate(made: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate, but not the third batch of the second rank, in its worker."""
    assert get_worker_info() is not None
    batch = default_collate(made)
    if int(batch.pop("index")[0]) == 2 and torch.distributed.get_rank() == FAILING_RANK:
        raise ValueError(MESSAGE)
    return batch


class Data(LightningDataModule):
    """Six samples.

    Args:
        collate: Fail while collating in a worker process.
    """

    def __init__(self, collate: bool = False) -> None:
        super().__init__()
        self.collate = collate

    def train_dataloader(self) -> DataLoader:
        made = [sample | {"index": torch.tensor(index)} for index, sample in enumerate(samples(6))]
        if self.collate:
            return DataLoader(made, num_workers=1, collate_fn=failing_collate)  # type: ignore[arg-type]
        return DataLoader(samples(6))  # type: ignore[arg-type]
