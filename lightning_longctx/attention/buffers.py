"""Memory for what arrives and what is summed, reused from step to step and from layer to layer.

A ring needs the same few sizes over and over. Fresh memory costs page faults on CPU, as much as the copy itself.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_KEPT_BYTES = 1 << 30
_CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

_SLACK = 1.25
"""A waiting buffer serves requests down to its size over this: packed documents ask for other sizes in every batch."""


def keep_freed_memory() -> None:
    """Let this process keep the memory of tensors that are gone for the next ones; for training on CPU.

    glibc gives freed memory of this size back to the kernel at once, and every page of it costs a fault when it is
    needed again: up to a fifth of the time of attention over short documents. Other C libraries are left alone, and so
    is a user's own choice: with MALLOC_MMAP_THRESHOLD_=1048576 in the environment a process holds hardly more than its
    tensors take.
    """
    if any(name in os.environ for name in _CHOSEN):
        return
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


class Buffers:
    """Tensors that wait to be used again. Not for results: who takes a buffer gives it back.

    What waits never takes more memory than was in use at one time.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], dict[int, list[Tensor]]] = {}
        self._lent: dict[int, Tensor] = {}
        self._free_bytes = self._lent_bytes = self._most_lent_bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor of that shape."""
        size = math.prod(shape)
        if size == 0:
            return torch.empty(shape, dtype=dtype, device=device)
        flat = self._find(size, self._free.get((dtype, device), {}))
        if flat is None:
            flat = torch.empty(size, dtype=dtype, device=device)
        self._lent[flat.data_ptr()] = flat
        self._lent_bytes += flat.nbytes
        self._most_lent_bytes = max(self._most_lent_bytes, self._lent_bytes)
        return (flat if flat.numel() == size else flat[:size]).view(*shape)

    def give(self, tensor: Tensor) -> None:
        """Take back a tensor got by ``take``, which its user must not touch any more."""
        if tensor.numel() == 0:
            return
        flat = self._lent.pop(tensor.data_ptr())
        self._lent_bytes -= flat.nbytes
        self._free_bytes += flat.nbytes
        self._free.setdefault((flat.dtype, flat.device), {}).setdefault(flat.numel(), []).append(flat)
        while self._free_bytes > self._most_lent_bytes:
            self._drop()

    def _find(self, size: int, free: dict[int, list[Tensor]]) -> Tensor | None:
        fitting = size if size in free else min((s for s in free if size <= s <= size * _SLACK), default=None)
        if fitting is None:
            return None
        flat = free[fitting].pop()
        self._free_bytes -= flat.nbytes
        if not free[fitting]:
            del free[fitting]
        return flat

    def _drop(self) -> None:
        """Free what has waited in the size that was first given back."""
        free = next(sizes for sizes in self._free.values() if sizes)
        self._find(next(iter(free)), free)
