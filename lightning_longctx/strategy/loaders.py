"""Data loaders of a run: cut every batch, give data ranks their own samples, and end on all ranks together.

All ranks of a context x head x tensor group must fetch the same batches, so they get the same samples, the same worker
randomness and the same end. Data ranks get different samples, and may run out at different times.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, IterableDataset

from lightning_longctx.batch import ShardCollate, Sharding
from lightning_longctx.strategy.agreement import AgreeingLoader, DataRanks, gather_over

__all__ = ["DataRankAware", "DataRanks", "gather_over", "shard_loader"]


@runtime_checkable
class DataRankAware(Protocol):
    """A dataset (or iterable) that reads a different part of its data on every data rank.

    The strategy calls ``set_data_rank`` in the trainer's process before the first batch and before workers start. All
    ranks that share a data rank must then yield the same samples; dividing them among workers stays the dataset's work
    (``torch.utils.data.get_worker_info``).
    """

    def set_data_rank(self, rank: int, num_ranks: int) -> None:
        """Read part ``rank`` of ``num_ranks``."""
        ...


def shard_loader(loader: Any, sharding: Sharding, ranks: DataRanks, *, training: bool) -> Any:
    """Make a loader fit the run. Safe to call again with the same loader, or with what an earlier call returned.

    A ``DataLoader`` is changed in place: its ``collate_fn`` is wrapped in ``ShardCollate``, and workers are seeded by
    data rank. Batches of any other iterable are left whole: cut them with ``batch.ensure_sharded`` as they arrive.
    With more than one data rank, what has no reliable length is wrapped in ``AgreeingLoader``.

    Args:
        loader: A ``DataLoader`` or any other iterable of batches.
        sharding: How batches are cut.
        ranks: The data axis. With several data ranks this call is collective over them.
        training: Whether it feeds ``training_step``: decides what happens when data ranks end at different times.

    Raises:
        ValueError: With several data ranks: data that is not ``DataRankAware`` would repeat on each of them, or the
            data ranks have different numbers of batches. Raised on every rank.
    """
    if isinstance(loader, AgreeingLoader):
        loader = loader.loader
    if isinstance(loader, DataLoader):
        _shard_dataloader(loader, sharding, ranks)
    if ranks.num_ranks == 1:
        return loader
    iterable_only = not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
    if iterable_only:
        _split_data(loader.dataset if isinstance(loader, DataLoader) else loader, ranks)
    length = _agreed_length(loader, ranks)
    return AgreeingLoader(loader, ranks, training=training) if iterable_only or length is None else loader


def _shard_dataloader(loader: DataLoader, sharding: Sharding, ranks: DataRanks) -> None:
    collate_fn = loader.collate_fn
    while isinstance(collate_fn, ShardCollate):
        collate_fn = collate_fn.collate_fn
    loader.collate_fn = ShardCollate(collate_fn, sharding)
    if loader.worker_init_fn is None:
        # Lightning would seed workers by global rank, so that ranks that share a sequence would draw different ones.
        loader.worker_init_fn = partial(pl_worker_init_function, rank=ranks.rank)
    if loader.generator is None:
        # Workers' seeds come from here. The default generator drifts apart between ranks: each draws its own dropout.
        loader.generator = torch.Generator().manual_seed((ranks.seed + ranks.rank) % 2**63)
    if getattr(loader.sampler, "generator", loader) is None:
        loader.sampler.generator = torch.Generator().manual_seed((ranks.seed + ranks.rank) % 2**63)  # type: ignore[attr-defined]


def _split_data(data: Any, ranks: DataRanks) -> None:
    if not isinstance(data, DataRankAware):
        raise ValueError(
            f"{type(data).__name__} would yield the same samples on each of the {ranks.num_ranks} data ranks. Give it "
            "a method set_data_rank(rank, num_ranks) that keeps every num_ranks-th sample, use a map-style dataset, "
            "or set data=1."
        )
    data.set_data_rank(ranks.rank, ranks.num_ranks)


def _agreed_length(loader: Any, ranks: DataRanks) -> int | None:
    length = sized_len(loader)
    lengths = ranks.gather(-1 if length is None else length)
    if len(set(lengths)) > 1:
        known = [None if length < 0 else length for length in lengths]
        raise ValueError(
            f"data ranks 0 to {ranks.num_ranks - 1} have {known} batches of {type(loader).__name__}: the ones with "
            "fewer would leave the others waiting. Let every data rank have the same number: leave "
            "use_distributed_sampler on (which evens them out, but for predict), drop samples, or set data=1."
        )
    return length
