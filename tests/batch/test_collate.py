import pickle
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_longctx.batch import ShardCollate, Sharding, ensure_sharded, shard_batch

SHARDING = Sharding("zigzag", 2, 2, 1, 4)


class Rows(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(index)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(sample(index) for index in range(6))


def sample(index: int) -> dict[str, Any]:
    row = torch.arange(10) + 100 * index
    return {"input_ids": row, "labels": row, "index": index}


def expected(first: int, sharding: Sharding = SHARDING) -> dict[str, Any]:
    return shard_batch(default_collate([sample(first), sample(first + 1)]), sharding)


def assert_same(batch: dict[str, Any], other: dict[str, Any]) -> None:
    assert batch.keys() == other.keys()
    for key, value in other.items():
        same = torch.equal(batch[key], value) if isinstance(value, torch.Tensor) else batch[key] == value
        assert same, key


def test_collate_then_cut() -> None:
    collate = ShardCollate(default_collate, SHARDING)
    batch = collate([sample(0), sample(1)])
    assert batch["input_ids"][1].tolist() == [103, 104, 105, 106, 107, 108]
    assert batch["index"].tolist() == [0, 1]
    assert_same(pickle.loads(pickle.dumps(collate))([sample(0), sample(1)]), batch)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True},
        {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
    ],
)
def test_workers_send_shards(options: dict[str, Any]) -> None:
    loader = DataLoader(Rows(), batch_size=2, collate_fn=ShardCollate(default_collate, SHARDING), **options)
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == 3
        for number, batch in enumerate(batches):
            assert_same(batch, expected(2 * number))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_datasets(num_workers: int) -> None:
    loader = DataLoader(
        Stream(), batch_size=2, collate_fn=ShardCollate(default_collate, SHARDING), num_workers=num_workers
    )
    for number, batch in enumerate(loader):
        assert_same(batch, expected(2 * number))


def test_a_dataset_of_whole_batches() -> None:
    batches = [default_collate([sample(0), sample(1)])]
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    loader.collate_fn = ShardCollate(loader.collate_fn, SHARDING)
    assert_same(next(iter(loader)), expected(0))


def test_single_sequences_are_refused_with_their_shape() -> None:
    loader: Any = DataLoader(Rows(), batch_size=None)
    loader.collate_fn = ShardCollate(loader.collate_fn, SHARDING)
    with pytest.raises(ValueError, match=r"input_ids of shape \(10,\) must be \[B, S\]"):
        next(iter(loader))


def test_a_worker_s_error_keeps_its_words() -> None:
    rows = [(torch.arange(4), torch.arange(4))] * 2
    loader = DataLoader(rows, collate_fn=ShardCollate(default_collate, SHARDING), num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Return a dict from collate_fn"):
        next(iter(loader))


class Pair(NamedTuple):
    left: Any
    right: Any


def test_batches_that_no_collate_has_seen_are_cut() -> None:
    batch = default_collate([sample(0), sample(1)])
    assert_same(ensure_sharded(batch, SHARDING), expected(0))
    assert ensure_sharded(None, SHARDING) is None
    by_name = ensure_sharded({"a": batch, "b": None}, SHARDING)
    assert_same(by_name["a"], expected(0))
    assert by_name["b"] is None
    for several in ([batch, expected(0)], (batch, expected(0)), Pair(batch, expected(0))):
        cut = ensure_sharded(several, SHARDING)
        assert type(cut) is type(several)
        assert_same(cut[0], expected(0))
        assert_same(cut[1], expected(0))


def test_batches_that_a_collate_has_cut_are_checked() -> None:
    shard = expected(0)
    assert ensure_sharded(shard, SHARDING) is shard
    with pytest.raises(ValueError, match="Build a new loader"):
        ensure_sharded(shard, replace(SHARDING, rank=0))
    with pytest.raises(ValueError, match="`sequence` holds a str"):
        ensure_sharded({"input_ids": torch.ones(1, 4), "sequence": "ACGT"}, SHARDING)


@pytest.mark.parametrize("batch", [(torch.ones(1, 4), torch.ones(1, 4)), [], {"a": torch.ones(1, 4)}])
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        ensure_sharded(batch, SHARDING)
