"""Samplers and batch samplers of the user's, dealt out and continued."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_longctx.batch import Sharding
from lightning_longctx.strategy.samples.agreement import DataRanks
from lightning_longctx.strategy.samples.loaders import shard_loader
from lightning_longctx.strategy.samples.orders import DrawnOrder, IndexOrder
from lightning_longctx.strategy.samples.samplers import DealtSampler, SeedingIndex
from tests.strategy.streams import Rows


class Stirred(Sampler):
    """Draws from the generators that everybody uses."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(8).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        return iter(order)


class Rotated(Sampler):
    """Goes by the epoch it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % 8 for index in range(8)])


class Pairs:
    """A batch sampler of batches that are not alike, over a sampler of its own; no ``BatchSampler``."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        return iter([indices[:1], indices[1:3], indices[3:6], indices[6:]])


class Secret(Sampler):
    """Cannot be drawn again: its generator is hidden."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(8).tolist())


def ranks(rank: int, num_ranks: int = 2, others: int | None = None) -> DataRanks:
    return DataRanks(rank, num_ranks, lambda value: [value, *[value if others is None else others] * (num_ranks - 1)])


def dealt(make: Any, num_ranks: int = 2, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    """First tokens of every rank's batches; ranks have drawn different numbers before."""
    found = []
    for rank in range(num_ranks):
        torch.rand(rank)
        random.random()
        loader = shard_loader(make(), Sharding(), ranks(rank, num_ranks), training=False, dealing=True)
        loader.sampler.set_epoch(epoch)
        found.append([batch["input_ids"][:, 0].tolist() for batch in loader])
    return found


def loader(**options: Any) -> DataLoader:
    return DataLoader(Rows(8), **options)


@pytest.mark.parametrize("make", [Stirred, lambda: RandomSampler(range(8), replacement=True, num_samples=8)])
def test_a_random_sampler_draws_the_same_on_all_ranks(make: Any) -> None:
    both = dealt(lambda: loader(sampler=make(), batch_size=2))
    alone = dealt(lambda: loader(sampler=make(), batch_size=4), num_ranks=1)[0]
    assert [sorted(one + two) for one, two in zip(*both, strict=True)] == [sorted(batch) for batch in alone]
    assert alone != dealt(lambda: loader(sampler=make(), batch_size=4), num_ranks=1, epoch=1)[0]


def test_drawing_an_order_leaves_no_trace() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = (float(torch.rand(())), random.random())
    torch.manual_seed(5)
    random.seed(5)
    DrawnOrder(Stirred(), 0).take(0, range(8))
    assert (float(torch.rand(())), random.random()) == expected


def test_shuffle_false_is_honoured_in_training_and_weights_are_not_ignored() -> None:
    def tokens(given: DataLoader) -> list[int]:
        made = shard_loader(given, Sharding(), ranks(0, 1), training=True, dealing=True)
        return [int(batch["input_ids"][0, 0]) for batch in made]

    assert tokens(loader()) == list(range(8))
    assert tokens(loader(shuffle=True)) == IndexOrder(8, True, 0).take(0, range(8)) != list(range(8))
    assert set(tokens(loader(sampler=WeightedRandomSampler([0, 0, 1, 0, 0, 0, 0, 0], 8)))) == {2}


def test_samplers_are_told_the_epoch() -> None:
    assert dealt(lambda: loader(sampler=Rotated(), batch_size=2), epoch=3) == [[[3, 5], [7, 1]], [[4, 6], [0, 2]]]
    inner = Rotated()
    pairs = Pairs(inner)
    found = dealt(lambda: loader(batch_sampler=pairs), epoch=3)
    assert found == [[[3], [6, 7, 0]], [[4, 5], [1, 2]]]
    assert set(pairs.told) == {0, 3} and inner.epoch == 3


def test_batches_of_a_batch_sampler_are_dealt_whole() -> None:
    def make() -> DataLoader:
        return loader(batch_sampler=Pairs(SequentialSampler(range(8))))

    assert dealt(make) == [[[0], [3, 4, 5]], [[1, 2], [6, 7]]]
    with pytest.warns(UserWarning, match="last batch of 4 samples has none for 2 of 3 data ranks"):
        assert [len(batches) for batches in dealt(make, num_ranks=3)] == [2, 2, 2]


def test_subclasses_and_what_was_given_are_kept() -> None:
    class Mine(DataLoader):
        def __init__(self, dataset: Any, name: str) -> None:
            super().__init__(dataset, batch_size=2)
            self.name = name

    given = Mine(Rows(8), "mine")
    made = shard_loader(given, Sharding(), ranks(0), training=True, dealing=True)
    again = shard_loader(made, Sharding(), ranks(1), training=True, dealing=True)
    assert (type(again), again.name, len(again), again.batch_size) == (Mine, "mine", 2, 2)
    assert [batch["input_ids"][:, 0].tolist() for batch in again] == [[1, 3], [5, 7]]
    assert isinstance(given.sampler, SequentialSampler) and type(given.batch_sampler) is BatchSampler


def test_a_distributed_sampler_of_yours_is_left_alone() -> None:
    sampler: Any = DistributedSampler(range(8), 2, 1, shuffle=False)  # type: ignore[arg-type]
    made = shard_loader(loader(sampler=sampler), Sharding(), ranks(1), training=False, dealing=True)
    assert made.sampler is sampler


def test_samplers_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(ValueError, match="Secret draws other samples on data ranks \\[1\\]"):
        shard_loader(loader(sampler=Secret()), Sharding(), ranks(0, 2, others=7), training=True, dealing=True)
    with pytest.raises(ValueError, match=r"generator has no length.*use_distributed_sampler: false"):
        endless: Any = (index for index in range(8))
        shard_loader(loader(sampler=endless), Sharding(), ranks(0), training=True, dealing=True)

    class Short(Rotated):
        def __len__(self) -> int:
            return 9

    with pytest.raises(ValueError, match="Short yields 8 entries, but its length is 9"):
        shard_loader(loader(sampler=Short()), Sharding(), ranks(0), training=True, dealing=True)


def with_generator() -> Sampler:
    return RandomSampler(range(8), replacement=True, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("make", [Stirred, Rotated, with_generator])
def test_an_order_is_drawn_again_from_its_state(make: Any) -> None:
    order = DrawnOrder(make(), 1)
    epochs = [order.take(epoch, range(8)) for epoch in range(3)]
    later = DrawnOrder(make(), 9)
    later.load(order.state(), True)
    assert later.take(2, range(3, 8)) == epochs[2][3:]
    assert later.take(3, range(8)) == order.take(3, range(8))


def test_another_order_is_refused() -> None:
    secret, plain = DrawnOrder(Secret(), 0), IndexOrder(8, True, 0)
    secret.take(0, range(8))
    other = DrawnOrder(Secret(), 0)
    other.load(secret.state(), True)
    with pytest.raises(ValueError, match="Secret draws another order for epoch 0"):
        other.take(0, range(8))
    with pytest.raises(ValueError, match="8 samples in the dataset, and now there are 9"):
        IndexOrder(9, True, 0).load(plain.state(), True)
    with pytest.raises(ValueError, match="shuffle"):
        IndexOrder(8, False, 0).load(plain.state(), True)
    with pytest.raises(ValueError, match="8 entries of Short"):

        class Short(Rotated):
            def __len__(self) -> int:
                return 7

        DrawnOrder(Short(), 0).load(DrawnOrder(Rotated(), 0).state(), True)


def test_one_iteration_begins_later_and_the_next_one_does_not() -> None:
    from lightning_longctx.strategy.samples.deal import Deal

    sampler = DealtSampler(IndexOrder(8, False, 0), Deal(8, 2, 2), 1)
    sampler.continue_at(0, 1)
    assert list(sampler) == [5, 7]
    assert list(sampler) == [1, 3, 5, 7]
    sampler.continue_at(0, 1)
    sampler.set_epoch(1)
    assert list(sampler) == [1, 3, 5, 7]
    sampler.continue_at(0, 2)
    assert list(sampler) == []
    assert len(sampler) == 4


def test_an_index_arrives_as_a_plain_one() -> None:
    index = SeedingIndex(5, 3)
    assert index == 5 and [0, 1, 2, 3, 4, 7][index] == 7
    arrived = pickle.loads(pickle.dumps([index, 6]))
    assert arrived == [5, 6] and type(arrived[0]) is int


def drawn_from(first: int, num_workers: int, persistent: bool) -> list[list[list[float]]]:
    """What is drawn for the batches from ``first`` on, in two epochs."""
    given = DataLoader(Rows(8, draws=True), batch_size=2, num_workers=num_workers, persistent_workers=persistent)
    made = shard_loader(given, Sharding(), ranks(0, 1), training=True, dealing=True)
    made.sampler.continue_at(0, first)
    found = []
    for epoch in range(2):
        made.sampler.set_epoch(epoch)
        found.append([batch["drawn"].tolist() for batch in made])
    return found


def test_workers_draw_for_a_batch_and_not_for_what_came_before() -> None:
    whole = drawn_from(0, 1, False)
    assert len({number for epoch in whole for batch in epoch for number in batch}) == 16
    assert drawn_from(2, 2, True) == [whole[0][2:], whole[1]]
