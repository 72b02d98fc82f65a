"""Loaders without an order of samples, set to a place inside an epoch."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_longctx.strategy.samples.streaming import StreamLoader
from tests.strategy.streams import Lines, StatefulLines

THERE: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "drop_last": False}


def stream(dataset: Any = None, **options: Any) -> StreamLoader:
    return StreamLoader(DataLoader(dataset or Lines(12), **(THERE | options)), (0, 1))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"batch_size": 4}, r"batch_size=4: .*after 3 batches.*with batch_size=2.*Use batch_size=2, or resume"),
        ({"batch_size": None}, r"batch_size=None: .*with batch_size=2"),
        ({"num_workers": 0}, r"num_workers=0: .*with num_workers=2"),
        ({"drop_last": True}, r"drop_last=True: .*with drop_last=False"),
    ],
)
def test_other_batches_are_refused_inside_an_epoch(option: dict[str, Any], message: str) -> None:
    """As many of them would be other samples: some would be skipped, or seen twice."""
    with pytest.raises(ValueError, match=message):
        stream(**option).continue_at(stream().position(3))


@pytest.mark.parametrize("option", [{"batch_size": 4}, {"num_workers": 0}, {"drop_last": True}])
def test_between_epochs_batches_may_change(option: dict[str, Any]) -> None:
    stream(**option).continue_at(stream().position(0))


def test_the_same_batches_are_thrown_away() -> None:
    loader = stream(num_workers=0)
    loader.continue_at(stream(num_workers=0).position(4))
    assert [batch["input_ids"][:, 0].tolist() for batch in loader] == [[8, 9], [10, 11]]


def test_a_dataset_with_a_state_may_change_its_batches() -> None:
    """Its state counts samples."""
    there, then = (stream(StatefulLines(12), num_workers=0, batch_size=size) for size in (2, 4))
    batches = iter(there)
    for _ in range(2):
        next(batches)
    then.continue_at(there.position(2))
    assert [batch["input_ids"][:, 0].tolist() for batch in then] == [[4, 5, 6, 7], [8, 9, 10, 11]]
