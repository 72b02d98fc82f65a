"""Kept activations in pinned host memory: what offloading is on CUDA. Copies run on streams of their own."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_longctx.memory.offloading.copies import Copies, CudaCopies
from lightning_longctx.memory.offloading.slots import Slots
from lightning_longctx.memory.offloading.store import (
    MOST_IN_FLIGHT,
    Form,
    Place,
    changed,
    closed,
    fetched_twice,
    flattened,
)

_SLAB_BYTES = 1 << 28
_ALIGNMENT = 512


class Slot(NamedTuple):
    """Where in the slabs."""

    slab: int
    start: int


@dataclass
class Departure:
    """A copy out. The tensor is held until the work after it waits for the copy: memory is then used again in order.

    (``Tensor.record_stream`` would free it only when the host sees the copy done, and the host is far ahead.)
    """

    tensor: Tensor | None
    form: Form
    copy: Any
    changed: bool = False


class HostStore:
    """Slabs of host memory that are kept until the store is closed.

    Tensors must have been made on the stream that is current when they are put, as in any training step.

    Args:
        device: Of the tensors.
        copies: What copies, if not two CUDA streams.
    """

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        self._device = device
        self._copies = CudaCopies(device) if copies is None else copies
        self._slabs: list[tuple[Tensor, Slots]] = []
        self._in_flight: deque[Departure] = deque()
        self._dropped: deque[tuple[Slot, Tensor | None, Any]] = deque()  # owners end in any thread: no lock there
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, self._copies.finish)

    @property
    def num_waiting(self) -> int:
        """Tensors that have a slot."""
        with self._lock:
            self._reclaim()
            return sum(slots.num_taken for _, slots in self._slabs)

    @property
    def num_bytes(self) -> int:
        """Host memory of the slabs."""
        return sum(slab.nbytes for slab, _ in self._slabs)

    def put(self, tensor: Tensor) -> HostPlace:
        """See ``Store``."""
        flat, form = flattened(tensor, self._device)
        with self._lock:
            self._begin()
            while len(self._in_flight) >= MOST_IN_FLIGHT:
                self._let_go()
            slot = self._take(form.num_bytes)
            departure = Departure(flat, form, self._copies.out(self._host(slot, form), flat))
            self._in_flight.append(departure)
        return HostPlace(self, slot, departure)

    def prefetch(self, place: Place) -> None:
        """See ``Store``."""
        assert isinstance(place, HostPlace)
        with self._lock:
            self._begin()
            self._start_back(place)

    def fetch(self, place: HostPlace) -> Tensor:
        """What ``place.get()`` is."""
        with self._lock:
            self._begin()
            form = place.departure.form
            while place.departure.tensor is not None:
                self._let_go()
            if place.departure.changed:
                raise changed(form)
            self._start_back(place)
            self._copies.hold(place.arrival)
            self._slabs[place.slot.slab][1].give(place.slot.start)
        assert place.arriving is not None
        return form.shaped(place.arriving)

    def drop(self, place: HostPlace) -> None:
        """Take back the slot of a place whose tensor nobody fetched."""
        self._dropped.append((place.slot, place.arriving, place.arrival))

    def close(self) -> None:
        """See ``Store``."""
        self._end()
        self._in_flight.clear()
        self._slabs.clear()

    def _begin(self) -> None:
        if not self._end.alive:
            raise closed()
        self._reclaim()
        while self._in_flight and self._copies.is_done(self._in_flight[0].copy):
            self._let_go()

    def _let_go(self) -> None:
        """Free the tensor that was first to leave."""
        departure = self._in_flight.popleft()
        self._copies.hold(departure.copy)
        assert departure.tensor is not None
        departure.changed = not departure.form.is_unchanged(departure.tensor)
        departure.tensor = None

    def _reclaim(self) -> None:
        while self._dropped and self._slabs:
            slot, arriving, arrival = self._dropped.popleft()
            if arriving is not None:
                self._copies.hold(arrival)  # before its memory is used for something else
            self._slabs[slot.slab][1].give(slot.start)

    def _take(self, num_bytes: int) -> Slot:
        for index, (_, slots) in enumerate(self._slabs):
            if (start := slots.take(num_bytes)) is not None:
                return Slot(index, start)
        size = max(_SLAB_BYTES, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        try:
            slab = self._copies.memory(size)
        except RuntimeError as error:
            raise RuntimeError(
                f"there are no {size} bytes of pinned host memory for offloaded activations, beyond {self.num_bytes} "
                f"that they have: {error}. Name fewer regions in checkpointing.offload, or run fewer ranks per node."
            ) from error
        self._slabs.append((slab, Slots(_ALIGNMENT, limit=size)))
        start = self._slabs[-1][1].take(num_bytes)
        assert start is not None
        return Slot(len(self._slabs) - 1, start)

    def _host(self, slot: Slot, form: Form) -> Tensor:
        return self._slabs[slot.slab][0][slot.start : slot.start + form.num_bytes].view(form.dtype)

    def _start_back(self, place: HostPlace) -> None:
        if place.arriving is None:
            form = place.departure.form
            place.arriving = form.empty(self._device)
            host = self._host(place.slot, form)
            place.arrival = self._copies.back(place.arriving, host, after=place.departure.copy)


class HostPlace:
    """A tensor in host memory."""

    def __init__(self, store: HostStore, slot: Slot, departure: Departure) -> None:
        self.slot, self.departure = slot, departure
        self.arriving: Tensor | None = None
        self.arrival: Any = None
        self._store: HostStore | None = store

    @property
    def num_bytes(self) -> int:
        """See ``Place``."""
        return self.departure.form.num_bytes

    def get(self) -> Tensor:
        """See ``Place``."""
        if self._store is None:
            raise fetched_twice(self.departure.form)
        tensor = self._store.fetch(self)
        self._store = self.arriving = None
        return tensor

    def __del__(self) -> None:
        if self._store is not None:
            self._store.drop(self)
