"""Streaming datasets of litdata; it is not imported here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def is_litdata(loader: Any) -> bool:
    """Whether it is litdata's ``StreamingDataLoader``, if litdata was imported at all."""
    module = sys.modules.get("litdata.streaming.dataloader")
    return module is not None and isinstance(loader, module.StreamingDataLoader)


def is_litdata_collate(collate_fn: Any) -> bool:
    """Whether it is what litdata's loader puts around a ``collate_fn``."""
    module = sys.modules.get("litdata.streaming.dataloader")
    return module is not None and isinstance(collate_fn, module.StreamingDataLoaderCollateFn)


def is_litdata_dataset(dataset: Any) -> bool:
    """Whether it is one of litdata's datasets, or several of them together."""
    module = sys.modules.get("litdata.streaming.dataloader")
    kinds = () if module is None else (module.StreamingDataset, module._BaseStreamingDatasetWrapper)
    return isinstance(dataset, kinds)


def place_litdata(dataset: Any, rank: int, num_ranks: int) -> None:
    """Tell litdata's datasets which part they read; by themselves they take every process for a data rank."""
    environment = import_module("litdata.utilities.env")._DistributedEnv(num_ranks, rank, 1)
    for member in getattr(dataset, "_datasets", [dataset]):
        member.distributed_env = environment


@contextmanager
def litdata_place(rank: int, num_ranks: int) -> Iterator[None]:
    """Inside, litdata finds this place when it looks for one by itself, as when it loads a state."""
    wanted = {"WORLD_SIZE": str(num_ranks), "GLOBAL_RANK": str(rank)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
