"""Checkpoints as commands read them: in one process, on the CPU, without the module that was trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_longctx._upstream import METADATA_FILENAME
from lightning_longctx.strategy.checkpoints.readable import readable


def unpickled(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """What ``torch.save`` wrote to a file.

    Args:
        path: The file, or a sharded checkpoint's directory, of which it reads what is not sharded.
        weights_only: As in ``torch.load``.

    Raises:
        ValueError: It cannot be read, or holds no checkpoint.
    """
    path = path / METADATA_FILENAME if path.is_dir() else path
    with readable(path):
        content = torch.load(path, map_location="cpu", weights_only=weights_only)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, no checkpoint.")
    return content


def gathered(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Entries of a sharded checkpoint, whole.

    Args:
        path: Its directory.
        wanted: Whether to read an entry, of whose name the first part says what it belongs to: ``state_dict.``,
            ``optimizer_0.``, ...

    Raises:
        ValueError: It cannot be read.
    """
    with readable(path):
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    entries = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in stored.items()
        if wanted(name)
    }
    with warnings.catch_warnings(), readable(path):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
        dcp.load(entries, checkpoint_id=path)
    return entries
