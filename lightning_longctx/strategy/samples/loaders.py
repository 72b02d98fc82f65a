"""Data loaders of a run: cut every batch, give data ranks their own samples, and end on all ranks together.

All ranks of a context x head x tensor group must fetch the same batches, so they get the same samples, the same worker
randomness and the same end. Data ranks get different samples, and may run out at different times.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_longctx import _upstream
from lightning_longctx.batch import ShardCollate, Sharding
from lightning_longctx.strategy.failure.worker_signals import outliving
from lightning_longctx.strategy.samples.agreement import AgreeingLoader, DataRanks, gather_over, gather_values_over
from lightning_longctx.strategy.samples.around import innermost
from lightning_longctx.strategy.samples.samplers import DealtSampler
from lightning_longctx.strategy.samples.sampling import deal_out, has_indices, is_dealt_by_itself, keep_order
from lightning_longctx.strategy.samples.stand_ins import StandInLoader
from lightning_longctx.strategy.samples.streaming import StreamLoader

__all__ = ["DataRankAware", "DataRanks", "gather_over", "gather_values_over", "shard_loader"]


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


def shard_loader(loader: Any, sharding: Sharding, ranks: DataRanks, *, training: bool, dealing: bool = False) -> Any:
    """Make a loader fit the run. Safe to call again with the same loader, or with what an earlier call returned.

    Batches of a ``DataLoader`` are cut by ``ShardCollate`` around its ``collate_fn``, and its workers are seeded by
    data rank. Batches of any other iterable are left whole: cut them with ``batch.ensure_sharded`` as they arrive. With
    more than one data rank, what has no reliable length is wrapped in ``AgreeingLoader``.

    Args:
        loader: A ``DataLoader`` or any other iterable of batches.
        sharding: How batches are cut.
        ranks: The data axis. With several data ranks this call is collective over them.
        training: Whether it feeds ``training_step``: such loaders can continue inside an epoch. It also decides what
            happens when data ranks end at different times.
        dealing: Whether to divide the samples of a map-style dataset among data ranks.

    Returns:
        A copy of a ``DataLoader`` whose sampler had to change, the ``DataLoader`` itself, or something around it.

    Raises:
        ValueError: With several data ranks: data that is not ``DataRankAware`` would repeat on each of them, the data
            ranks have different numbers of batches, or a sampler cannot be dealt out. Raised on every rank.
    """
    loader = innermost(loader)
    if has_indices(loader):
        if dealing and not is_dealt_by_itself(loader):
            loader = deal_out(loader, ranks)
        elif training:
            loader = keep_order(loader, ranks)
    if isinstance(loader, DataLoader):
        _shard_dataloader(loader, sharding, ranks)
    if not has_indices(loader) and ranks.num_ranks > 1:
        _split_data(loader.dataset if isinstance(loader, DataLoader) else loader, ranks)
    around = _around(loader, ranks, training)
    if ranks.num_ranks == 1:
        return around
    length = _agreed_length(loader, ranks)
    ends_apart = not has_indices(loader) or length is None
    return AgreeingLoader(around, ranks, training=training) if ends_apart else around


def _around(loader: Any, ranks: DataRanks, training: bool) -> Any:
    """What stands directly in front of a loader, or itself."""
    sampler = loader.sampler if has_indices(loader) else None
    if isinstance(sampler, DealtSampler):
        return StandInLoader(loader, sampler) if sampler.deal.needs_stand_ins else loader
    return StreamLoader(loader, (ranks.rank, ranks.num_ranks)) if training else loader


def _shard_dataloader(loader: DataLoader, sharding: Sharding, ranks: DataRanks) -> None:
    loader.collate_fn = _cutting(loader.collate_fn, sharding)
    if loader.worker_init_fn is None:
        # Lightning would seed workers by global rank, so that ranks that share a sequence would draw different ones.
        loader.worker_init_fn = partial(pl_worker_init_function, rank=ranks.rank)
    loader.worker_init_fn = outliving(loader.worker_init_fn)
    if loader.generator is None:
        # Workers' seeds come from here. The default generator drifts apart between ranks: each draws its own dropout.
        loader.generator = torch.Generator().manual_seed((ranks.seed + ranks.rank) % 2**63)
    if getattr(loader.sampler, "generator", loader) is None:
        loader.sampler.generator = torch.Generator().manual_seed((ranks.seed + ranks.rank) % 2**63)  # type: ignore[attr-defined]


def _cutting(collate_fn: Any, sharding: Sharding) -> Any:
    if _upstream.is_litdata_collate(collate_fn):
        # It takes samples apart before it calls the user's one, and puts counters of its own around the batch.
        around = copy(collate_fn)
        around.collate_fn = _cutting(collate_fn.collate_fn, sharding)
        return around
    while isinstance(collate_fn, ShardCollate):
        collate_fn = collate_fn.collate_fn
    return ShardCollate(collate_fn, sharding)


def _split_data(data: Any, ranks: DataRanks) -> None:
    if _upstream.is_litdata_dataset(data):
        _upstream.place_litdata(data, ranks.rank, ranks.num_ranks)
        return
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
