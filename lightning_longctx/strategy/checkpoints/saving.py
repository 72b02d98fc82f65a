"""Saves of a run: one after another, at once or in the background, and never half of one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_longctx._upstream import METADATA_FILENAME
from lightning_longctx.models.atomic import Draft, remove

GRACE_SECONDS = 10.0
"""How long a save in the background may take to end after an error."""


class Saves:
    """Writes a run's checkpoints. Every rank has one; all methods but ``remove`` and ``leave`` are collective.

    Args:
        in_background: Whether ``save`` returns before the files are written. What is saved is copied before; the next
            save, loading and the end of the run wait. Ranks then talk in a gloo group of their own.
        timeout: How long ranks wait for each other in the background.
    """

    def __init__(self, in_background: bool, timeout: timedelta) -> None:
        self.in_background = in_background
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._running: _Save | None = None

    def save(self, checkpoint: dict[str, Any], path: Path, sharded: bool) -> None:
        """Write a checkpoint. It has its name once it is whole; until then what had the name stays.

        Args:
            checkpoint: Lightning's, with ``state_dict`` and ``optimizer_states``.
            path: The same on all ranks.
            sharded: Whether every rank writes its part into a directory; else rank 0 writes one file.

        Raises:
            RuntimeError: A rank could not write its part, here or in the save before. Raised on every rank.
        """
        self.finish()
        draft, first = Draft(path, folder=sharded), dist.get_rank() == 0
        content, rest = split(checkpoint) if sharded else (checkpoint if first else {}, {})

        def begin() -> None:
            if first:
                draft.begin()
            if first and sharded:
                torch.save(rest, draft.partial / METADATA_FILENAME)

        save = _Save(draft, first)
        save.run(begin)
        _agree(save)
        if self.in_background:
            if self._group is None:
                self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=self._timeout))
            group = self._group
            content = snapshot(content)
            save.start(lambda: _write(content, draft.partial, sharded, group))
            self._running = save
        else:
            save.run(lambda: _write(content, draft.partial, sharded, None), last=True)
            _agree(save)

    def remove(self, path: Path) -> None:
        """Remove an older checkpoint, on rank 0. While a new one is being written, that happens when it is whole."""
        if self._running is None or not self._running.later(path):
            remove(path)

    def finish(self) -> None:
        """Wait for the save that is still being written.

        Raises:
            RuntimeError: A rank could not write its part. Raised on every rank.
        """
        save, self._running = self._running, None
        if save is not None:
            save.wait(None)
            _agree(save)

    def leave(self, exception: BaseException) -> None:
        """The run ends with an error, maybe of this rank alone: let the save end by itself, or forget it."""
        save, self._running = self._running, None
        # All ranks stop on SIGTERM, and each goes on writing; after an error that is only likely.
        seconds = None if isinstance(exception, SIGTERMException) else GRACE_SECONDS
        if save is not None and not save.wait(seconds):
            self._group = None  # still in use

    def close(self) -> None:
        """Finish, and give the process group back."""
        self.finish()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = None


class _Save:
    """One save, as one rank sees it."""

    def __init__(self, draft: Draft, first: bool) -> None:
        self.path = draft.path
        self.failure: str | None = None
        self._draft = draft
        self._first = first
        self._older: list[Path] = []
        self._is_whole = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, write: Callable[[], None]) -> None:
        # A daemon, so that a process whose peers are gone can end.
        self._thread = threading.Thread(target=self.run, args=(write, True), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None) -> bool:
        """Whether it is over after at most so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def run(self, write: Callable[[], None], last: bool = False) -> None:
        """Do a part of the work; after the last, the checkpoint is in its place or a failure is noted."""
        try:
            write()
            if last and self._first:
                self._draft.commit()
            if last:
                self._remove_older()
        except (Exception, dcp.CheckpointException) as problem:
            self.failure = reason(problem)
            if self._first:
                self._draft.discard()

    def later(self, path: Path) -> bool:
        """Remove ``path`` once this save is in its place, and only then. False if it is there already."""
        with self._lock:
            if not self._is_whole:
                self._older.append(path)
            return not self._is_whole

    def _remove_older(self) -> None:
        with self._lock:
            self._is_whole = True
        for path in self._older:
            remove(path)


def _write(content: dict[str, Any], partial: Path, sharded: bool, group: dist.ProcessGroup | None) -> None:
    if sharded:
        dcp.save(content, checkpoint_id=partial, process_group=group)
    elif content:
        torch.save(content, partial)


def _agree(save: _Save) -> None:
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, save.failure)
    if told := [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]:
        raise RuntimeError(
            f"saving the checkpoint {save.path} failed ({'; '.join(told)}). What was saved before is still there."
        )


def split(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is sharded of a checkpoint, and the rest."""
    rest = dict(checkpoint)
    sharded = {"state_dict": rest.pop("state_dict")}
    sharded |= {f"optimizer_{index}": state for index, state in enumerate(rest.pop("optimizer_states", []))}
    return sharded, rest


def snapshot(value: Any) -> Any:
    """A copy which training does not change: of tensors, and of the containers that hold them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is tuple or type(value) is list:
        return type(value)(map(snapshot, value))
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = snapshot(item)
        return copied
    return value


def reason(problem: BaseException) -> str:
    """What failed, in one line; DCP's report holds those of all ranks."""
    if isinstance(problem, dcp.CheckpointException) and problem.failures:
        failures = {rank: failure[0] for rank, failure in problem.failures.items()}
        return "; ".join(f"{type(failure).__name__} on rank {rank}: {failure}" for rank, failure in failures.items())
    return f"{type(problem).__name__}: {problem}"
