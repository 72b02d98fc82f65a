"""Data ranks as threads of this process: a gather is a barrier, and a hang is a broken barrier."""

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_longctx.strategy.samples.agreement import AgreeingLoader, DataRanks


class Meeting:
    """Every thread's number, exchanged."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = Barrier(num_ranks)
        self.said = [0] * num_ranks

    def ranks(self, rank: int) -> DataRanks:
        def gather(value: int) -> list[int]:
            self.said[rank] = value
            self.barrier.wait(10)
            everyone = list(self.said)
            self.barrier.wait(10)
            return everyone

        return DataRanks(rank, len(self.said), gather)


def together(num_ranks: int, work: Callable[[DataRanks], Any]) -> list[Any]:
    """What ``work`` returned or raised on every data rank."""
    meeting = Meeting(num_ranks)

    def one(rank: int) -> Any:
        try:
            return work(meeting.ranks(rank))
        except (RuntimeError, OSError) as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Breaking:
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise OSError("the disk is gone")


def epochs(lengths: list[int], *, training: bool, num_epochs: int = 1) -> list[Any]:
    def work(ranks: DataRanks) -> list[list[int]]:
        loader = AgreeingLoader(DataLoader(Stream(lengths[ranks.rank]), batch_size=None), ranks, training=training)
        return [list(loader) for _ in range(num_epochs)]

    return together(len(lengths), work)


@pytest.mark.parametrize("training", [True, False])
def test_equal_ends(training: bool) -> None:
    assert epochs([3, 3], training=training, num_epochs=2) == [[[0, 1, 2], [0, 1, 2]]] * 2
    assert epochs([0, 0], training=training) == [[[]]] * 2


def test_training_ends_with_the_first_rank_and_says_so_once() -> None:
    with pytest.warns(UserWarning, match=r"\[1\] ended after 2 batches, data ranks \[0, 2\] have more") as caught:
        assert epochs([3, 2, 4], training=True, num_epochs=2) == [[[0, 1], [0, 1]]] * 3
    # A thread is rank zero, as each of them believes: one warning from each.
    assert len([warning for warning in caught if "ended after" in str(warning.message)]) == 3


@pytest.mark.parametrize(("lengths", "training"), [([3, 2], False), ([2, 0], False), ([2, 0], True)])
def test_other_uneven_ends_are_an_error_on_every_rank(lengths: list[int], training: bool) -> None:
    message = rf"data ranks \[1\] ended after {lengths[1]} batches, data ranks \[0\] have more.*data=1"
    for error in epochs(lengths, training=training):
        assert isinstance(error, RuntimeError)
        with pytest.raises(RuntimeError, match=message):
            raise error


def test_a_rank_that_fails_does_not_leave_the_others_waiting() -> None:
    def work(ranks: DataRanks) -> list[int]:
        loader = Breaking() if ranks.rank else DataLoader(Stream(3), batch_size=None)
        return list(AgreeingLoader(loader, ranks, training=True))

    fine, failed = together(2, work)
    assert isinstance(failed, OSError) and str(failed) == "the disk is gone"
    assert isinstance(fine, RuntimeError) and "[1] failed to fetch batch 1" in str(fine)


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size", "sequential"])
def test_members_of_a_combined_loader(mode: Any) -> None:
    def work(ranks: DataRanks) -> list[Any]:
        lengths = ([3, 5], [4, 2])[ranks.rank]
        members = [AgreeingLoader(DataLoader(Stream(n), batch_size=None), ranks, training=True) for n in lengths]
        return [[batch for batch, _, _ in CombinedLoader(members, mode)] for _ in range(2)]

    first, second = together(2, work)
    assert first == second
    expected = {
        "max_size_cycle": [[0, 0], [1, 1], [2, 0]],
        "max_size": [[0, 0], [1, 1], [2, None]],
        "min_size": [[0, 0], [1, 1]],
        "sequential": [0, 1, 2, 0, 1],
    }[mode]
    assert first == [expected] * 2


def alone() -> DataRanks:
    return DataRanks(0, 1, lambda value: [value])


def test_the_loader_shines_through() -> None:
    loader: Any = AgreeingLoader(DataLoader(list(range(6)), batch_size=2), alone(), training=True)  # type: ignore[arg-type]
    assert len(loader) == 3
    assert loader.batch_size == 2
    loader.collate_fn = list
    assert loader.loader.collate_fn is list
    assert list(loader) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(AttributeError):
        _ = loader.state_dict
    with pytest.raises(TypeError):
        len(AgreeingLoader(DataLoader(Stream(3)), alone(), training=True))


def test_workers_are_shut_down_through_it() -> None:
    inner = DataLoader(Stream(4), batch_size=None, num_workers=1, persistent_workers=True)
    combined = CombinedLoader(AgreeingLoader(inner, alone(), training=True), "max_size_cycle")
    for _ in range(2):
        assert [int(batch) for batch, _, _ in combined] == [0, 1, 2, 3]
        assert inner._iterator is not None
        combined.reset()
        assert inner._iterator is None


def test_a_stateful_loader_is_saved() -> None:
    class Stateful(list):
        def state_dict(self) -> dict[str, int]:
            return {"position": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.append(state["position"])

    stateful = Stateful([1])
    combined = CombinedLoader(AgreeingLoader(stateful, alone(), training=True), "max_size_cycle")
    states = combined._state_dicts()
    assert states == [{"position": 3}]
    combined._load_state_dicts(states)
    assert stateful == [1, 3]
    assert CombinedLoader(AgreeingLoader([1], alone(), training=True), "max_size_cycle")._state_dicts() == []


def test_a_copy_does_not_run_in_circles() -> None:
    blank = AgreeingLoader.__new__(AgreeingLoader)
    with pytest.raises(AttributeError, match="loader"):
        _ = blank.anything
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(AgreeingLoader([1], alone(), training=True))  # its gather is a lambda here
    assert torch.equal(next(iter(AgreeingLoader([torch.ones(2)], alone(), training=True))), torch.ones(2))
