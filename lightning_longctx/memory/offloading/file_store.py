"""Kept activations in a file: what offloading is on CPU.

A file is written and read with calls that take bytes from tensors and put them there, and not mapped into memory:
mapped pages would count as this process's memory until they are dropped. Such calls let other threads run.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from lightning_longctx.memory.offloading.clerk import Clerk, Task
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

CPU = torch.device("cpu")
Write = Callable[[int, memoryview, int], int]
_PAGE = 4096


class FileStore:
    """A file without a name, which the system deletes when the process ends, however it ends.

    It grows to the most that waits at one time, and keeps that until it is closed. The system may hold parts of it in
    memory that nobody needs; it takes them back when somebody does.

    Args:
        folder: Where it lies; ``None`` is the folder for temporary files (``TMPDIR``).
        write: As ``os.pwrite``.
    """

    def __init__(self, folder: Path | None = None, write: Write = os.pwrite) -> None:
        file = tempfile.TemporaryFile(prefix="lightning-longctx-", dir=folder, buffering=0)
        self._descriptor, self._write = file.fileno(), write
        self._where = folder or tempfile.gettempdir()
        self._slots, self._lock = Slots(_PAGE), threading.Lock()
        self._in_flight = threading.BoundedSemaphore(MOST_IN_FLIGHT)
        self._failures: deque[BaseException] = deque()
        self._dropped: deque[int] = deque()  # their owners end in any thread, at any time: no lock there
        # The thread that made a tensor frees it: the profiler that counts bytes hears of one thread.
        self._leaving: deque[tuple[Task[bool], Tensor]] = deque()
        self._clerk = Clerk("lightning-longctx-offload", partial(_delete, file))
        self._end = weakref.finalize(self, self._clerk.stop)

    @property
    def num_waiting(self) -> int:
        """Tensors that have a slot."""
        with self._lock:
            self._reclaim()
            return self._slots.num_taken

    @property
    def num_bytes(self) -> int:
        """What their slots span, which the file is at least as long as."""
        with self._lock:
            self._reclaim()
            return self._slots.end

    def put(self, tensor: Tensor) -> FilePlace:
        """See ``Store``."""
        self._check()
        if self._failures:
            raise self._failed(self._failures.popleft())
        flat, form = flattened(tensor, CPU)
        self._in_flight.acquire()
        with self._lock:
            self._reclaim()
            start = self._slots.take(form.num_bytes)
        assert start is not None
        writing = Task(partial(self._send, self._write, self._descriptor, flat, form, start, self._failures))
        self._leaving.append((writing, flat))
        self._clerk.begin(writing)
        self._clerk.begin(Task(self._in_flight.release))  # called off or not
        return FilePlace(self, form, start, writing)

    def prefetch(self, place: Place) -> None:
        """See ``Store``."""
        self._check()
        assert isinstance(place, FilePlace)
        if place.reading is None:
            flat = place.form.empty(CPU)
            place.reading = Task(partial(_read_all, self._descriptor, flat, place.start))
            place.arriving = flat
            self._clerk.begin(place.reading)

    def fetch(self, place: FilePlace) -> Tensor:
        """What ``place.get()`` is."""
        self._check()
        try:
            if not place.writing.wait():
                raise changed(place.form)
            if place.reading is None:
                place.arriving = place.form.empty(CPU)
                _read_all(self._descriptor, place.arriving, place.start)
            else:
                place.reading.wait()
        except OSError as error:
            raise self._failed(error) from error
        assert place.arriving is not None
        with self._lock:
            self._slots.give(place.start)
        return place.form.shaped(place.arriving)

    def drop(self, start: int) -> None:
        """Take back a slot whose tensor nobody fetched."""
        self._dropped.append(start)

    def close(self) -> None:
        """See ``Store``."""
        self._end()

    @staticmethod
    def _send(
        write: Write, descriptor: int, flat: Tensor, form: Form, start: int, failures: deque[BaseException]
    ) -> bool:
        try:
            _write_all(write, descriptor, flat, start)
        except BaseException as error:
            failures.append(error)
            raise
        return form.is_unchanged(flat)

    def _reclaim(self) -> None:
        while self._dropped:
            self._slots.give(self._dropped.popleft())

    def _check(self) -> None:
        while self._leaving and self._leaving[0][0].is_done:
            self._leaving.popleft()
        if not self._end.alive:
            raise closed()
        self._clerk.check()

    def _failed(self, error: BaseException) -> OSError:
        text = (
            f"offloaded activations could not be kept in a file in {self._where} ({self.num_bytes} bytes are in use): "
            f"{error}. Make room there, set TMPDIR to another disk, or name fewer regions in checkpointing.offload."
        )
        return OSError(error.errno, text) if isinstance(error, OSError) and error.errno else OSError(text)


class FilePlace:
    """A tensor in a file."""

    def __init__(self, store: FileStore, form: Form, start: int, writing: Task[bool]) -> None:
        self.form, self.start, self.writing = form, start, writing
        self.reading: Task[None] | None = None
        self.arriving: Tensor | None = None
        self._store: FileStore | None = store

    @property
    def num_bytes(self) -> int:
        """See ``Place``."""
        return self.form.num_bytes

    def get(self) -> Tensor:
        """See ``Place``."""
        if self._store is None:
            raise fetched_twice(self.form)
        tensor = self._store.fetch(self)
        self._store = self.arriving = None
        return tensor

    def __del__(self) -> None:
        if self._store is not None:
            for task in (self.writing, self.reading):
                if task is not None:
                    task.call_off()
            self._store.drop(self.start)


def _write_all(write: Write, descriptor: int, flat: Tensor, start: int) -> None:
    left = _bytes(flat)
    while left:
        written = write(descriptor, left, start)
        left, start = left[written:], start + written


def _read_all(descriptor: int, flat: Tensor, start: int) -> None:
    left = _bytes(flat)
    while left:
        read = os.preadv(descriptor, [left], start)
        if not read:
            raise OSError(f"the file ends {len(left)} bytes early")
        left, start = left[read:], start + read


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _delete(file: IO[bytes]) -> None:
    with file:
        os.ftruncate(file.fileno(), 0)  # forked processes may hold it open
