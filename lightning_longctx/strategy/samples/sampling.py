"""Puts the samplers of training and evaluation into a ``DataLoader``."""

from __future__ import annotations

from copy import copy
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_longctx.attention.dropout import mixed_seed
from lightning_longctx.strategy.samples.agreement import DataRanks
from lightning_longctx.strategy.samples.deal import Deal
from lightning_longctx.strategy.samples.orders import DrawnOrder, IndexOrder, Order
from lightning_longctx.strategy.samples.samplers import DealtSampler


def deal_out(loader: DataLoader, ranks: DataRanks) -> DataLoader:
    """A copy of a loader that gives every data rank its part of one global order.

    The order is the one that ``torch.utils.data.DistributedSampler`` would have, shuffled only if the loader shuffles;
    that of a sampler of your own; or the batches of a batch sampler of your own, which are dealt whole.

    Args:
        loader: Over a map-style dataset.
        ranks: The data axis. A collective over it for samplers of your own.

    Raises:
        ValueError: A sampler has no length, or does not draw the same on all data ranks.
    """
    sampler, batch_sampler = _given(loader)
    deals_batches = batch_sampler is not None and not _is_plain(batch_sampler)
    chosen: Any = batch_sampler if deals_batches else sampler
    order: Order
    if not deals_batches and _takes_all(chosen):
        order = IndexOrder(len(chosen), not isinstance(chosen, SequentialSampler), ranks.order_seed)
    else:
        order = _drawn(chosen, ranks.order_seed)
        _check_agreement(order, ranks)
    batch_size = 1 if deals_batches else (loader.batch_size or 1)
    deal = Deal(len(order), batch_size, ranks.num_ranks, not deals_batches and loader.drop_last)
    return _with(loader, DealtSampler(order, deal, ranks.rank, _worker_seed(loader, ranks)), deals_batches)


def keep_order(loader: DataLoader, ranks: DataRanks) -> DataLoader:
    """A copy of a loader that samples as it did, and can be continued inside an epoch; itself without a length.

    Args:
        loader: Over a map-style dataset, with a sampler that divides samples among data ranks itself.
        ranks: The data axis.
    """
    sampler, batch_sampler = _given(loader)
    deals_batches = batch_sampler is not None and not _is_plain(batch_sampler)
    chosen = batch_sampler if deals_batches else sampler
    if sized_len(chosen) is None:
        return loader
    order = DrawnOrder(chosen, mixed_seed(ranks.seed, ranks.rank))
    deal = Deal(len(order), 1 if deals_batches else (loader.batch_size or 1), 1, not deals_batches and loader.drop_last)
    worker_seed = _worker_seed(loader, ranks)
    dealt = DealtSampler(order, deal, 0, None if worker_seed is None else mixed_seed(worker_seed, ranks.rank))
    dealt.kind = "own"
    return _with(loader, dealt, deals_batches)


def is_dealt_by_itself(loader: DataLoader) -> bool:
    """Whether a loader has a sampler that knows of data ranks already."""
    sampler, batch_sampler = _given(loader)
    return any(isinstance(one, DistributedSampler) for one in (sampler, getattr(batch_sampler, "sampler", None)))


def _given(loader: DataLoader) -> tuple[Any, Any]:
    """The user's sampler and batch sampler, also in a loader that was made here before."""
    dealt = loader.sampler
    return dealt.given if isinstance(dealt, DealtSampler) else (loader.sampler, loader.batch_sampler)


def _with(loader: DataLoader, dealt: DealtSampler, deals_batches: bool) -> DataLoader:
    dealt.given = _given(loader)
    changed = copy(loader)
    # In its __dict__, since a DataLoader refuses to have these set: a new one would be made by the user's __init__.
    vars(changed)["sampler"] = dealt
    if deals_batches:
        vars(changed)["batch_sampler"] = dealt
    elif loader.batch_sampler is not None:
        vars(changed)["batch_sampler"] = BatchSampler(dealt, loader.batch_size or 1, loader.drop_last)
    changed._iterator = None
    return changed


def _is_plain(batch_sampler: Any) -> bool:
    """Whether it only groups what the sampler yields."""
    return type(batch_sampler) is BatchSampler or _is_of_torchdata(batch_sampler, "BatchSampler")


def _takes_all(sampler: Any) -> bool:
    """Whether it yields every index once, in turn or at random."""
    if isinstance(sampler, RandomSampler) or _is_of_torchdata(sampler, "RandomSampler"):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _is_of_torchdata(sampler: Any, name: str) -> bool:
    kind = type(sampler)
    return kind.__name__ == name and kind.__module__.startswith("torchdata.stateful_dataloader")


def _drawn(sampler: Any, seed: int) -> DrawnOrder:
    if sized_len(sampler) is None:
        raise ValueError(
            f"{type(sampler).__name__} has no length, so its samples cannot be dealt out to data ranks. Give it "
            "__len__, or set use_distributed_sampler: false and let it yield each data rank's own samples."
        )
    return DrawnOrder(sampler, seed)


def _check_agreement(order: DrawnOrder, ranks: DataRanks) -> None:
    if ranks.num_ranks > 1 and len(set(sums := ranks.gather(order.checksum(0)))) > 1:
        odd = [rank for rank, checksum in enumerate(sums) if checksum != sums[0]]
        raise ValueError(
            f"{type(order.sampler).__name__} draws other samples on data ranks {odd} than on data rank 0, so some "
            "would be dealt out twice. Let it draw from torch's, NumPy's or Python's own generators, which are seeded "
            "alike for it, from a generator seeded alike on all ranks, or from what set_epoch says."
        )


def _worker_seed(loader: DataLoader, ranks: DataRanks) -> int | None:
    """None where nothing is drawn in workers, or the user seeds them."""
    return ranks.seed if loader.num_workers > 0 and loader.worker_init_fn is None else None


def has_indices(loader: Any) -> bool:
    """Whether it is a ``DataLoader`` over a map-style dataset."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
