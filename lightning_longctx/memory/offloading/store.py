"""What waits outside of device memory: the contract of stores, and how a tensor lies in memory."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_longctx._upstream import version_of

MOST_IN_FLIGHT = 2
"""Tensors on their way out at one time: one is copied while the next is computed, and more would fill the device."""


class Place(Protocol):
    """One tensor that waits outside; the slot is used again once it is fetched, or dropped without that."""

    @property
    def num_bytes(self) -> int:
        """What it takes outside."""
        ...

    def get(self) -> Tensor:
        """Wait for it: values, dtype, shape and strides as they were, in memory of its own. Once only.

        Raises:
            RuntimeError: It was fetched before, the store is closed, or the tensor changed on its way out.
            OSError: The file could not be written or read.
        """
        ...


class Store(Protocol):
    """Keeps tensors of one device elsewhere. For one process; its threads and streams belong to it."""

    def put(self, tensor: Tensor) -> Place:
        """Start the copy out. Waits only where two others are still on their way.

        The caller may drop the tensor at once, but must not write to it before the copy is done.

        Raises:
            OSError: A write of this or of an earlier tensor failed: the disk is full, for one.
            RuntimeError: The store is closed, or belongs to a process that this one was forked from.
            TypeError: The tensor has no plain memory of its own (DTensor, sparse, fake) or is on another device.
        """
        ...

    def prefetch(self, place: Place) -> None:
        """Start the copy back, so that ``place.get()`` need not wait."""
        ...

    def close(self) -> None:
        """Give everything back. What was not fetched is lost."""
        ...


class Form(NamedTuple):
    """How a tensor lies in memory.

    Args:
        shape: Of the tensor.
        stride: Likewise; from the first to the last element lie ``num_elements``, those between included.
        dtype: Likewise.
        num_elements: What is copied.
        version: Grows when the tensor is written to.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_elements: int
    version: int | None

    @property
    def num_bytes(self) -> int:
        """Of all ``num_elements``."""
        return self.num_elements * self.dtype.itemsize

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether nothing was written to the tensor since."""
        return _version(tensor) == self.version

    def empty(self, device: torch.device) -> Tensor:
        """Fresh flat memory for such a tensor."""
        return torch.empty(self.num_elements, dtype=self.dtype, device=device)

    def shaped(self, flat: Tensor) -> Tensor:
        """The tensor in memory that ``empty`` returned."""
        return flat.as_strided(self.shape, self.stride)


def flattened(tensor: Tensor, device: torch.device) -> tuple[Tensor, Form]:
    """The memory of a tensor, from its first element to its last, and how to read it.

    Args:
        tensor: Any strides; elements between its own are copied as well, so that strides stay.
        device: Where it must be.

    Raises:
        TypeError: It is elsewhere, or has no plain memory of its own.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise TypeError(f"offload takes plain tensors, not {type(tensor).__name__} ({tensor.layout}): give local ones.")
    if tensor.device.type != device.type or tensor.device.index not in (None, device.index):
        raise TypeError(f"this store is for {device}, and the tensor is on {tensor.device}.")
    plain = tensor.detach().resolve_conj().resolve_neg()
    reach = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
    form = Form(plain.shape, plain.stride(), plain.dtype, reach + 1 if plain.numel() else 0, _version(plain))
    return plain.as_strided((form.num_elements,), (1,)), form


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else version_of(tensor)


def changed(form: Form) -> RuntimeError:
    """A tensor was written to on its way out."""
    return RuntimeError(
        f"an offloaded tensor of shape {tuple(form.shape)} was changed in place while it was copied out, so that what "
        "was kept is neither the old value nor the new one. Leave its region out of checkpointing.offload, or change a "
        "copy of it."
    )


def fetched_twice(form: Form) -> RuntimeError:
    """A place is empty."""
    return RuntimeError(
        f"an offloaded tensor of shape {tuple(form.shape)} was fetched already: a second backward over one forward "
        "(retain_graph=True) needs checkpointing.offload=[]."
    )


def closed() -> RuntimeError:
    """A store is over."""
    return RuntimeError("the store of offloaded activations is closed: what waited there is gone.")
