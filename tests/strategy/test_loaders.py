import pickle
import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_longctx.batch import ShardCollate, Sharding, ensure_sharded
from lightning_longctx.strategy.failure.worker_signals import OutliveSigterm
from lightning_longctx.strategy.samples.agreement import AgreeingLoader, DataRanks
from lightning_longctx.strategy.samples.loaders import shard_loader

SHARDING = Sharding("zigzag", 2, 2, 1)


def sample(index: int) -> dict[str, Any]:
    row = torch.arange(8) + 100 * index
    return {"input_ids": row, "labels": row}


class Rows(Dataset):
    def __init__(self, length: int = 6) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(index)


class Stream(IterableDataset):
    def __init__(self, length: int = 6) -> None:
        self.length = length
        self.share = (0, 1)

    def set_data_rank(self, rank: int, num_ranks: int) -> None:
        self.share = (rank, num_ranks)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(sample(index) for index in range(self.share[0], self.length, self.share[1]))


class DeafStream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([sample(0)])


class Random(Dataset):
    """Draws from every generator a user may draw from."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"input_ids": torch.arange(8), "drawn": torch.tensor(drawn, dtype=torch.float64)}


def ranks(rank: int = 0, num_ranks: int = 1, others: int | None = None) -> DataRanks:
    """Data ranks of which the others always say the same as this one, or ``others``."""
    return DataRanks(rank, num_ranks, lambda value: [value, *[value if others is None else others] * (num_ranks - 1)])


def first_tokens(loader: Any) -> list[int]:
    return [int(batch["input_ids"][0, 0]) for batch in loader]


def test_a_dataloader_is_wrapped_once() -> None:
    given = DataLoader(Rows(), batch_size=2)
    loader = shard_loader(given, Sharding(), ranks(), training=True)
    assert shard_loader(loader, SHARDING, ranks(), training=False) is loader
    collate: Any = loader.collate_fn
    assert given.collate_fn is default_collate
    assert collate == ShardCollate(default_collate, SHARDING)
    batches = list(loader)
    assert batches[0]["input_ids"].tolist() == [[2, 3, 4, 5], [102, 103, 104, 105]]
    assert batches[0]["sequence"] == SHARDING.record(8, 14, batches[0]["sequence"].checksum, row_lengths=(8,))


def test_other_iterables_stay_as_they_are() -> None:
    batches = [default_collate([sample(0)])]
    assert shard_loader(batches, SHARDING, ranks(), training=False) is batches
    assert shard_loader(batches, SHARDING, ranks(), training=True).loader is batches
    assert ensure_sharded(batches[0], SHARDING)["input_ids"].tolist() == [[2, 3, 4, 5]]


def test_subclasses_of_dataloader_keep_their_class() -> None:
    class Mine(DataLoader):
        pass

    loader = shard_loader(Mine(Rows()), SHARDING, ranks(0, 2), training=True)
    assert type(loader) is Mine
    assert first_tokens(loader) == [2, 102, 202, 302, 402, 502]


def drawn(data_rank: int, stray_draws: int) -> list[list[float]]:
    """What workers drew in two epochs, on a rank that itself drew some numbers (its dropout, say) in between."""
    loader = DataLoader(Random(), batch_size=2, num_workers=1)
    loader = shard_loader(loader, SHARDING, ranks(data_rank, 2), training=True)
    result = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        torch.rand(stray_draws)
        result.append(torch.stack([batch["drawn"] for batch in loader]).flatten().tolist())
    return result


def test_ranks_that_share_samples_draw_alike_in_workers() -> None:
    first, same, other = drawn(0, 1), drawn(0, 5), drawn(1, 1)
    assert first == same
    assert len({number for epoch in first + other for number in epoch}) == 4 * 12


def test_what_workers_need_can_be_spawned() -> None:
    loader = shard_loader(DataLoader(Rows()), SHARDING, ranks(1, 2), training=True)
    collate_fn, worker_init_fn = pickle.loads(pickle.dumps((loader.collate_fn, loader.worker_init_fn)))
    assert collate_fn == ShardCollate(default_collate, SHARDING)
    assert isinstance(worker_init_fn, OutliveSigterm)
    assert worker_init_fn.start.func is pl_worker_init_function  # type: ignore[attr-defined]
    assert worker_init_fn.start.keywords == {"rank": 1}  # type: ignore[attr-defined]


def test_your_own_worker_seeds_are_kept() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Rows(), worker_init_fn=print, generator=generator)
    loader = shard_loader(loader, SHARDING, ranks(), training=True)
    assert loader.worker_init_fn == OutliveSigterm(print)
    assert shard_loader(loader, SHARDING, ranks(), training=True).worker_init_fn == OutliveSigterm(print)
    assert loader.generator is generator


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_datasets_are_told_their_data_rank(num_workers: int) -> None:
    loaders = [DataLoader(Stream(), batch_size=1, num_workers=num_workers) for _ in range(2)]
    found = [
        first_tokens(shard_loader(loader, Sharding(), ranks(rank, 2), training=True))
        for rank, loader in enumerate(loaders)
    ]
    assert found == [[0, 200, 400], [100, 300, 500]]


@pytest.mark.parametrize("loader", [DataLoader(DeafStream()), [{"input_ids": torch.ones(1, 8)}]])
def test_data_that_would_repeat_is_refused(loader: Any) -> None:
    with pytest.raises(ValueError, match=r"(DeafStream|list) would yield the same.*set_data_rank\(rank, num_ranks\)"):
        shard_loader(loader, SHARDING, ranks(0, 2), training=True)
    shard_loader(loader, SHARDING, ranks(0, 1), training=True)


def test_other_lengths_on_other_data_ranks_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"have \[6, 5\] batches.*data=1"):
        shard_loader(DataLoader(Rows()), SHARDING, ranks(0, 2, others=5), training=True)
    with pytest.raises(ValueError, match=r"have \[None, 5\] batches"):
        shard_loader(DataLoader(Stream()), SHARDING, ranks(0, 2, others=5), training=True)


def test_what_has_no_length_agrees() -> None:
    inner = DataLoader(Stream())
    loader = shard_loader(inner, SHARDING, ranks(0, 2), training=True)
    assert isinstance(loader, AgreeingLoader) and loader.loader.loader is inner
    again = shard_loader(loader, SHARDING, ranks(0, 2), training=False)
    assert isinstance(again, AgreeingLoader) and again.loader is inner
    assert first_tokens(again) == [2, 202, 402]


class Peer:
    """The other data rank, played: it has so many batches every epoch, and takes part in every exchange."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.left = num_batches

    def gather(self, value: int) -> list[int]:
        if value == -1:  # comparing lengths
            return [-1, -1]
        ready = int(self.left > 0)
        self.left -= 1
        if not ready or value != 1:
            self.left = self.num_batches  # the epoch is over for both
        return [value, ready]


class OneOfTwo(SingleDeviceStrategy):
    """One device that believes it is the first of two data ranks."""

    def __init__(self, peers: list[Peer]) -> None:
        super().__init__("cpu")
        self.peers = iter(peers)

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        peer = next(self.peers)
        return shard_loader(dataloader, SHARDING, DataRanks(0, 2, peer.gather), training=trainer.training)


class Counting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[tuple[str, int, Any]] = []

    def saw(self, stage: str, batch: Any) -> None:
        tokens = [int(part["input_ids"][0, 0]) for part in (batch if isinstance(batch, list) else [batch])]
        self.seen.append((stage, self.current_epoch, tokens))

    def training_step(self, batch: Any) -> torch.Tensor:
        self.saw("train", batch)
        return self.weight.sum()

    def validation_step(self, batch: Any) -> None:
        self.saw("val", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(tmp_path: Any, peers: list[Peer], **options: Any) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=OneOfTwo(peers), default_root_dir=tmp_path, **(quiet | options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mine", "theirs", "steps"), [(3, 3, 3), (3, 2, 2), (2, 3, 2)])
def test_fit_takes_the_same_steps_in_every_epoch(tmp_path: Any, mine: int, theirs: int, steps: int) -> None:
    model = Counting()
    run = trainer(tmp_path, [Peer(theirs), Peer(2)], max_epochs=2, num_sanity_val_steps=0)
    run.fit(model, DataLoader(Stream(2 * mine)), DataLoader(Stream(4)))
    train = [("train", epoch, [200 * step + 2]) for epoch in range(2) for step in range(steps)]
    assert [entry for entry in model.seen if entry[0] == "train"] == train
    assert [entry[0] for entry in model.seen].count("val") == 4
    assert run.global_step == 2 * steps


@pytest.mark.filterwarnings("ignore")
def test_fit_with_limits_and_several_loaders(tmp_path: Any) -> None:
    model = Counting()
    run = trainer(tmp_path, [Peer(9), Peer(9), Peer(9)], max_epochs=2, limit_train_batches=2, limit_val_batches=1)
    loaders = CombinedLoader([DataLoader(Stream(8)), DataLoader(Stream(6))], "max_size_cycle")
    run.fit(model, loaders, DataLoader(Stream(8)))
    train = [entry for entry in model.seen if entry[0] == "train"]
    assert train == [("train", epoch, [token, token]) for epoch in range(2) for token in (2, 202)]


@pytest.mark.filterwarnings("ignore")
def test_validation_over_part_of_the_data_is_an_error(tmp_path: Any) -> None:
    model = Counting()
    with pytest.raises(RuntimeError, match=r"data ranks \[1\] ended after 2 batches, data ranks \[0\] have more"):
        trainer(tmp_path, [Peer(2)]).validate(model, DataLoader(Stream(6)), verbose=False)
    with pytest.raises(RuntimeError, match=r"data ranks \[1\] ended after 0 batches"):
        trainer(tmp_path, [Peer(3), Peer(0)], max_epochs=1).fit(model, DataLoader(Stream(6)), DataLoader(Stream(6)))
    run = trainer(tmp_path, [Peer(2), Peer(2)], limit_val_batches=2)
    loader = DataLoader(Stream(6))
    run.validate(model, loader, verbose=False)
    run.validate(model, loader, verbose=False)
