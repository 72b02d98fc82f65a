"""A data rank's samples of one global order, from any position of an epoch on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

from lightning_longctx.attention.dropout import mixed_seed
from lightning_longctx.strategy.samples.deal import Deal
from lightning_longctx.strategy.samples.orders import Order


class DealtSampler(Sampler):
    """Yields one data rank's part of an order; a batch sampler, if the order is one of batches.

    Args:
        order: The same on all data ranks.
        deal: How it is dealt.
        rank: Data rank.
        worker_seed: Seeds what workers draw for a batch, together with epoch, batch and data rank, so that it is the
            same again after a resume; ``None`` leaves workers' generators alone.
    """

    def __init__(self, order: Order, deal: Deal, rank: int, worker_seed: int | None = None) -> None:
        self.order = order
        self.deal = deal
        self.rank = rank
        self.worker_seed = worker_seed
        self.kind = "dealt"  # or "own": what a sampler of the user's yields, undealt
        self.given: tuple[Any, Any] = (None, None)  # sampler and batch sampler that it stands for
        self.epoch = 0
        self.first_batch = 0  # of the iteration that runs
        self._continue_at: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from the next iteration on."""
        self.epoch = epoch

    def continue_at(self, epoch: int, batch: int) -> None:
        """Begin the next iteration with this batch, if it is one of this epoch; those after it begin with the first."""
        self.epoch = epoch
        self._continue_at = (epoch, batch)

    def __iter__(self) -> Iterator[Any]:
        (epoch, batch), self._continue_at = self._continue_at or (self.epoch, 0), None
        self.first_batch = batch if epoch == self.epoch else 0
        start = self.deal.start_of_batch(self.first_batch)
        if start >= self.deal.num_dealt:
            return
        mine = self.order.take(self.epoch, self.deal.positions(self.rank, start))
        if self.deal.has_stand_in(self.rank):
            place = self.deal.stand_in(self.rank)
            mine += self.order.take(self.epoch, range(place, place + 1))
        size = self.deal.batch_size
        for number, item in enumerate(mine):
            yield item if number % size else self._seeding(item, self.first_batch + number // size)

    def __len__(self) -> int:
        """Of a whole epoch, stand-in included."""
        return len(self.deal.positions(self.rank)) + self.deal.has_stand_in(self.rank)

    def _seeding(self, item: Any, batch: int) -> Any:
        if self.worker_seed is None:
            return item
        seed = mixed_seed(self.worker_seed, self.epoch, batch, self.rank)
        if isinstance(item, list) and item and type(item[0]) is int:
            return [SeedingIndex(item[0], seed), *item[1:]]
        return SeedingIndex(item, seed) if type(item) is int else item


class SeedingIndex(int):
    """An index that seeds a worker's generators when it arrives there, which is right before its batch is fetched.

    It arrives as a plain int. So what a worker draws depends on the batch, and not on which batches it fetched before:
    a run that is continued in the middle of an epoch draws the same.
    """

    seed: int

    def __new__(cls, index: int, seed: int) -> SeedingIndex:
        self = super().__new__(cls, index)
        self.seed = seed
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (int(self), self.seed)


def _arrive(index: int, seed: int) -> int:
    if get_worker_info() is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
    return index
