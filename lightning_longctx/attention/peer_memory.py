"""Reads the memory of another process of this machine, in one copy (Linux: process_vm_readv, "cross memory attach")."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor


class _Piece(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _find_call() -> ctypes._NamedFuncPointer | None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None) if sys.platform == "linux" else None
    if call is not None:
        pieces = (ctypes.POINTER(_Piece), ctypes.c_ulong)
        call.argtypes = (ctypes.c_int, *pieces, *pieces, ctypes.c_ulong)
        call.restype = ctypes.c_ssize_t
    return call


_CALL = _find_call()


def is_possible() -> bool:
    """Whether this system has the call at all; a process may still be refused."""
    return _CALL is not None


def read(process: int, addresses: Sequence[int], into: Sequence[Tensor]) -> None:
    """Fill contiguous CPU tensors from another process' memory, in one call.

    Args:
        process: Its id.
        addresses: Where the bytes of each begin there.
        into: Say how many.

    Raises:
        OSError: The system refuses, or there is no such process or address.
    """
    sizes = [tensor.nbytes for tensor in into]
    here, there = _pieces([tensor.data_ptr() for tensor in into], sizes), _pieces(addresses, sizes)
    copied = _CALL(process, here, len(here), there, len(there), 0)  # type: ignore[misc]  see is_possible
    if copied < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot read the memory of process {process}: {os.strerror(error)}")
    if copied < sum(sizes):
        _read_rest(process, addresses, into, copied)


def _pieces(addresses: Sequence[int], sizes: Sequence[int]) -> ctypes.Array[_Piece]:
    return (_Piece * len(sizes))(*zip(addresses, sizes, strict=True))


def _read_rest(process: int, addresses: Sequence[int], into: Sequence[Tensor], done: int) -> None:
    """One call copies 2 GiB at most."""
    rest, starts = [], []
    for tensor, address in zip(into, addresses, strict=True):
        if done < tensor.nbytes:
            rest.append(tensor.view(-1).view(torch.uint8)[done:])
            starts.append(address + done)
        done = max(0, done - tensor.nbytes)
    read(process, starts, rest)
