"""What a batch says, wherever it says it."""

from __future__ import annotations

from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn

from lightning_longctx.attention.dropout import mixed_seed
from lightning_longctx.sequence import SequenceRecord
from lightning_longctx.strategy.contents import convert_all_but_records, read_batch
from lightning_longctx.strategy.steps import whole_attention
from lightning_longctx.strategy.validate import check_module, check_optimizers
from lightning_longctx.topology import Degrees

RECORD = SequenceRecord(length=4)
BATCH = {"input_ids": torch.zeros(1, 4), "shift_labels": torch.ones(1, 4, dtype=torch.int64), "sequence": RECORD}
Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize("batch", [BATCH, (BATCH, 0), UserDict(BATCH), {"a": {"b": [BATCH]}}, [None, BATCH, "text"]])
def test_one_batch(batch: object) -> None:
    contents = read_batch(batch)
    assert contents.records == (RECORD,)
    assert contents.labels == (BATCH["shift_labels"],)


def test_several_batches_and_none() -> None:
    assert len(read_batch({"a": BATCH, "b": BATCH}).labels) == 2
    assert read_batch([torch.zeros(3), 1, "shift_labels"]).labels == ()


@pytest.mark.parametrize("batch", [BATCH, UserDict(BATCH), [BATCH], (BATCH,), Pair(BATCH, BATCH)])
def test_conversion_passes_records_by(batch: object) -> None:
    def convert(value: object) -> object:
        return value.half() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    converted = convert_all_but_records(convert)(batch)
    assert type(converted) is type(batch)
    member = converted if not isinstance(converted, list | tuple) else converted[0]
    assert member["sequence"] is RECORD
    assert member["input_ids"].dtype == torch.float16
    assert BATCH["input_ids"].dtype == torch.float32


def test_batches_must_be_cut() -> None:
    with pytest.raises(ValueError, match=r"context=2, but the batch of validation_step has no `sequence`"):
        with whole_attention(read_batch({}), Degrees(context=2), "validation_step", nn.Identity()):
            pass


def test_seeds_differ() -> None:
    seeds = {mixed_seed(seed, rank, step) for seed in range(8) for rank in range(8) for step in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_modules_that_are_refused() -> None:
    with pytest.raises(ValueError, match="1 is a SyncBatchNorm"):
        check_module(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), Degrees())
    check_module(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), Degrees())


def test_optimizers_of_other_parameters() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    check_optimizers([torch.optim.SGD(module.parameters(), lr=1.0)], module)
    with pytest.raises(ValueError, match="SGD holds 2 of 2 parameters .*OptimizerCallable"):
        check_optimizers([torch.optim.SGD(other.parameters(), lr=1.0)], module)
    empty = torch.optim.SGD([{"params": list(module.parameters())}, {"params": []}], lr=1.0)
    with pytest.raises(ValueError, match=r'SGD has no parameters in group 1 of 2.*leave out groups whose "params" are'):
        check_optimizers([empty], module)
