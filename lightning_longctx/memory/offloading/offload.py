"""Where kept activations wait outside of device memory: in pinned host memory (CUDA), or in a file (CPU)."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_longctx.memory.offloading.file_store import FileStore
from lightning_longctx.memory.offloading.host_store import HostStore
from lightning_longctx.memory.offloading.store import Place, Store

__all__ = ["Place", "Store", "open_store"]


def open_store(device: torch.device, folder: Path | None = None) -> Store:
    """A store for tensors of that device.

    Args:
        device: Of the tensors.
        folder: Where the file of a store on CPU lies, if not in the folder for temporary files. A disk, not a
            ``tmpfs``, which is memory.

    Raises:
        ValueError: Nothing is known to wait outside of such a device.
        OSError: There can be no file in ``folder``.
    """
    if device.type == "cpu":
        return FileStore(folder)
    if device.type == "cuda":
        return HostStore(device)
    raise ValueError(f"checkpointing.offload works on CPU and CUDA, not on {device.type}. Leave it out.")
