"""Processes of one thread each, joined by gloo, that do what they are told and sleep in between."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context, resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightning_longctx.testing.cluster import Place

_START_PATIENCE = timedelta(minutes=5)
_END_SECONDS = 10.0
_CAUSE_SECONDS = 1.0


class RankFailedError(RuntimeError):
    """A rank raised, or ended by itself."""


class Ranks:
    """Starts ``num_ranks`` processes and calls methods of the object that each of them holds.

    A rank waits for its next call in a read from a pipe, which takes no processor time: what the others do meanwhile is
    not disturbed.

    Args:
        num_ranks: Processes; ``torch.distributed`` is initialised in them.
        worker: Called with the rank in each process, to make the object. An importable class.
        places: How to start each rank, where they belong to an emulated cluster. Else all run here.
    """

    def __init__(self, num_ranks: int, worker: Callable[[int], object], places: Sequence[Place] = ()) -> None:
        context = get_context("spawn")
        self._directory = tempfile.TemporaryDirectory(prefix="lightning-longctx-bench-")
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        directory = Path(self._directory.name)
        resource_tracker.ensure_running()  # here: it outlives the ranks, and so would the place it was started in
        for rank, place in enumerate(places or [Place()] * num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, worker, rank, num_ranks, str(directory / "store")),
                name=f"rank {rank}",
                daemon=True,
            )
            with _started_at(place, directory / f"python{rank}"):
                process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(at_once=error[0] is not None)

    def call(self, method: str, *args: object, num_ranks: int | None = None) -> list[Any]:
        """Call a method of the first ``num_ranks`` objects at the same time (all by default).

        Returns:
            The results by rank.

        Raises:
            RankFailedError: With the traceback of the first rank that failed; the world cannot be used any more.
        """
        called = self._connections[:num_ranks]
        for rank, connection in enumerate(called):
            try:
                connection.send((method, args))
            except BrokenPipeError as ended:
                raise self._ended(rank) from ended
        results: dict[int, Any] = {}
        while len(results) < len(called):
            ready = wait([connection for rank, connection in enumerate(called) if rank not in results])
            for rank, connection in enumerate(called):
                if connection in ready:
                    results[rank] = self._receive(rank, connection)
        return [results[rank] for rank in range(len(called))]

    def close(self, *, at_once: bool = False) -> None:
        """End the processes; ``at_once`` if they may hang in a collective."""
        for connection in self._connections:
            connection.close()  # a rank that reads the next call sees the end of the pipe, and ends
        for process in self._processes:
            if at_once:
                process.kill()
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.cleanup()

    def _receive(self, rank: int, connection: Connection) -> Any:
        try:
            succeeded, result = connection.recv()
        except (EOFError, ConnectionResetError) as ended:
            raise self._ended(rank) from ended
        if not succeeded:
            # A lost connection may be all that this rank knows of one that has ended: then that one is the cause.
            dead = wait([process.sentinel for process in self._processes], timeout=_CAUSE_SECONDS)
            ended = [other for other, process in enumerate(self._processes) if process.sentinel in dead]
            cause = f"{self._ended(ended[0])} Then " if ended else ""
            raise RankFailedError(f"{cause}rank {rank} failed:\n{result}")
        return result

    def _ended(self, rank: int) -> RankFailedError:
        process = self._processes[rank]
        process.join(_END_SECONDS)
        return RankFailedError(f"rank {rank} ended by itself with exit code {process.exitcode}.")


@contextmanager
def _started_at(place: Place, launcher: Path) -> Iterator[None]:
    """Processes started inside go to the place, with one thread.

    They inherit the environment (OpenMP reads it when it is loaded, before any code of ours runs), and are started by
    running Python: a script that runs it at the place stands in for it.
    """
    before, python = dict(os.environ), spawn.get_executable()
    os.environ.update({"OMP_NUM_THREADS": "1", **place.environment})
    if place.prefix:
        launcher.write_text(f'#!/bin/sh\nexec {shlex.join([*place.prefix, os.fsdecode(python)])} "$@"\n')
        launcher.chmod(0o700)
        spawn.set_executable(str(launcher))
    try:
        yield
    finally:
        spawn.set_executable(python)
        for name in {"OMP_NUM_THREADS", *place.environment}:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _serve(connection: Connection, worker: Callable[[int], object], rank: int, num_ranks: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the command ends its ranks by itself
    torch.set_num_threads(1)
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Else gloo looks the host's name up, which not every machine can answer.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks, timeout=_START_PATIENCE
    )
    held = worker(rank)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            break
        try:
            reply = (True, getattr(held, method)(*args))
        except Exception:
            reply = (False, traceback.format_exc())
        connection.send(reply)
    # All process groups end with the process; destroying them while others still talk can abort it.
    os._exit(0)
