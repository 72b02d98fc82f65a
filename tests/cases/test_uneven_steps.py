"""Data ranks with different numbers of batches: the same steps on all ranks, or the same error; nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_longctx import CausalLM, Degrees
from tests.cases.tiny import data_rank, make_trainer, samples, tiny_module

DEGREES = Degrees(data=2, context=2)
SECONDS = 60.0


class Stream(IterableDataset):
    """``lengths[data rank]`` samples, as many as the rank has."""

    def __init__(self, lengths: tuple[int, int]) -> None:
        self.lengths = lengths
        self.length = -1

    def set_data_rank(self, rank: int, num_ranks: int) -> None:
        assert (rank, num_ranks) == data_rank(DEGREES)
        self.length = self.lengths[rank]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(samples(self.length))


class Iterable(Stream):
    """The same without a DataLoader: whole batches."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{key: value[None] for key, value in sample.items()} for sample in samples(self.length)])


class Counting(CausalLM):
    validations = 0

    def validation_step(self, *args: Any) -> None:
        self.validations += 1
        super().validation_step(*args)


def loader(kind: str, lengths: tuple[int, int], num_workers: int) -> Any:
    if kind == "iterable":
        return Iterable(lengths)
    if kind == "dataset":
        return DataLoader(samples(lengths[data_rank(DEGREES)[0]]), batch_size=1)  # type: ignore[arg-type]
    return DataLoader(Stream(lengths), batch_size=1, num_workers=num_workers)


def fit(
    kind: str, train: tuple[int, int], validation: tuple[int, int] | None, num_workers: int = 0, epochs: int = 2
) -> tuple[int, int, str]:
    """Training steps, validation steps and the error's message of this rank, which then waits for all others."""
    module, message = tiny_module(), ""
    module.__class__ = Counting
    trainer = make_trainer(DEGREES, max_epochs=epochs)
    loaders = [loader(kind, lengths, num_workers) for lengths in (train, validation) if lengths is not None]
    try:
        trainer.fit(module, *loaders)
    except (RuntimeError, ValueError) as error:
        message = str(error)
    dist.barrier()  # nobody has left, and nothing that somebody sent is still on its way
    return trainer.global_step, module.validations, message  # type: ignore[return-value]


def run(gloo: Any, *arguments: Any) -> tuple[int, int, str]:
    """What every rank says, which must be one thing."""
    results = gloo(4).run(fit, *arguments, timeout=SECONDS)
    assert results == results[:1] * 4
    return results[0]


@pytest.mark.parametrize(("kind", "num_workers"), [("stream", 0), ("stream", 1), ("iterable", 0)])
@pytest.mark.parametrize("lengths", [(3, 2), (1, 4), (2, 2)])
def test_training_takes_the_steps_that_all_have(
    gloo: Any, kind: str, num_workers: int, lengths: tuple[int, int]
) -> None:
    """B28: an epoch ends with the first data rank that has no batch left; the next epoch starts with all."""
    assert run(gloo, kind, lengths, None, num_workers) == (2 * min(lengths), 0, "")


@pytest.mark.parametrize(("lengths", "ended"), [((2, 0), 1), ((0, 2), 0), ((3, 2), 1), ((1, 2), 0)])
@pytest.mark.parametrize("kind", ["stream", "iterable"])
def test_validation_over_a_part_of_the_data_is_one_error(
    gloo: Any, kind: str, lengths: tuple[int, int], ended: int
) -> None:
    """B28: also where one data rank has nothing to validate on at all."""
    steps, validations, message = run(gloo, kind, (2, 2), lengths, 0, 1)
    assert steps == 2 and validations <= min(lengths)  # one batch is fetched ahead
    ends = f"data ranks [{ended}] ended after {min(lengths)} batches, data ranks [{1 - ended}] have more"
    assert ends in message and "limit_*_batches" in message


def test_a_training_stream_that_is_empty_on_one_data_rank_is_one_error(gloo: Any) -> None:
    """B28: zero steps would look like success."""
    steps, _, message = run(gloo, "stream", (2, 0), None)
    assert steps == 0 and "data ranks [1] ended after 0 batches" in message


@pytest.mark.parametrize("lengths", [(3, 2), (2, 3)])
def test_datasets_of_other_lengths_are_one_error(gloo: Any, lengths: tuple[int, int]) -> None:
    """B28: where lengths are known, the error comes before the first step, for training and for validation."""
    steps, _, message = run(gloo, "dataset", lengths, None)
    assert steps == 0 and f"have {list(lengths)} batches of DataLoader" in message
    _, validations, message = run(gloo, "dataset", (2, 2), lengths)
    assert validations == 0 and f"have {list(lengths)} batches of DataLoader" in message
