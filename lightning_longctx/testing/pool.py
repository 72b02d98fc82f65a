"""A persistent pool of gloo ranks: start a world once, run many functions in it."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_longctx.testing.failures import GRACE_SECONDS, is_spent, late_error, rank_error, summaries
from lightning_longctx.testing.messages import Call, Reply, World
from lightning_longctx.testing.nursery import Nursery
from lightning_longctx.testing.worker import STACK_SIGNAL

_START_SECONDS = 180.0
_STACK_SECONDS = 2.0
# Lightning is a hundred frames deep, and a stack shows the innermost first.
_LOG_LINES = 150


@dataclass
class _Running:
    """A world that stands."""

    world: World
    store: dist.TCPStore  # its server lives in this process: no port has to be guessed
    connections: list[Connection]
    pids: list[int]
    log_starts: list[int]

    def send_signal(self, number: signal.Signals) -> None:
        """To all ranks; one that has ended says so by its reply."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def output(self, rank: int) -> str:
        """What the rank wrote during the current call; its last lines."""
        with open(self.world.logs[rank], errors="replace") as log:
            log.seek(self.log_starts[rank])
            return "\n".join(log.read().splitlines()[-_LOG_LINES:])


class GlooPool:
    """Runs functions on ``num_ranks`` processes that share a gloo process group and stay alive between calls.

    In a rank ``torch.distributed`` is initialised and the environment is a launched process's (``RANK``,
    ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ...), so that a Lightning ``Trainer(devices=num_ranks,
    accelerator="cpu")`` runs inside without launching anything. Each call starts from seed 0 in the caller's working
    directory; environment variables, default dtype and device, gradient mode and deterministic mode are put back after
    it. Process groups that a call makes are gone after a restart: a later call must not count on them. Between calls
    the ranks are stopped (SIGSTOP) and take no processor time.

    The world starts at the first call. The next call gets a new one when ranks failed differently, did not answer, or
    have collected too many open files. It ends with ``close()``, with the ``with`` block, or with this process.

    Args:
        num_ranks: Processes.
        timeout: Seconds a call may take unless it says otherwise.
        poison_empty: In the ranks ``torch.empty`` returns NaN.
        nursery: Forks the ranks; pools that share one import torch and Lightning once. Its owner closes it.
    """

    def __init__(
        self, num_ranks: int, timeout: float = 120.0, *, poison_empty: bool = False, nursery: Nursery | None = None
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks} is no world; use 1 or more.")
        self.num_ranks = num_ranks
        self.timeout = timeout
        self._poison_empty = poison_empty
        self._owns_nursery = nursery is None
        self._nursery = nursery
        self._running: _Running | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="gloo-pool-")
        self._generations = itertools.count()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no world stands."""
        return list(self._running.pids) if self._running else []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank.

        Args:
            fn: A function at the top level of a module; it travels by name.
            *args: Passed on, by value.
            timeout: Seconds for this call.
            **kwargs: Passed on, by value.

        Returns:
            The results by rank. Tensors come back as copies.

        Raises:
            RankError: It raised, or a rank's process ended.
            TimeoutError: Ranks did not answer in time; the message shows where they were.
            ValueError: The function or an argument can't be pickled.
        """
        call = pickle.dumps(Call.pack(fn, args, kwargs))
        seconds = self.timeout if timeout is None else timeout
        running = self._start()
        try:
            running.send_signal(signal.SIGCONT)
            running.log_starts = [os.path.getsize(log) for log in running.world.logs]
            for connection in running.connections:
                with suppress(BrokenPipeError, ConnectionResetError):  # a rank that has ended: the reply says so
                    connection.send_bytes(call)
            replies = _collect(running.connections, seconds)
            _ask_for_stacks(running, [rank for rank in range(self.num_ranks) if rank not in replies])
        except BaseException:  # a test's own time limit, Ctrl-C: the ranks are somewhere in the call
            self._end()
            raise
        if is_spent(replies, self.num_ranks):
            codes = self._end()
        else:
            codes = {}
            running.send_signal(signal.SIGSTOP)  # each group has a thread that wakes a hundred times a second
        failed = summaries(replies, codes)
        if failed or len(replies) < self.num_ranks:
            outputs = {rank: running.output(rank) for rank in range(self.num_ranks)}
            if failed:
                raise rank_error(replies, failed, self.num_ranks, outputs)
            raise late_error(replies, self.num_ranks, seconds, outputs)
        return [replies[rank].value for rank in range(self.num_ranks)]  # type: ignore[union-attr]

    def close(self) -> None:
        """End the ranks."""
        self._end()
        if self._nursery is not None and self._owns_nursery:
            self._nursery.close()
            self._nursery = None
        self._directory.cleanup()

    def __enter__(self) -> GlooPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> _Running:
        if self._running is not None:
            return self._running
        if self._nursery is None:
            self._nursery = Nursery()
        folder = Path(self._directory.name, str(next(self._generations)))
        folder.mkdir()
        logs = tuple(str(folder / f"rank{rank}.log") for rank in range(self.num_ranks))
        for log in logs:
            Path(log).touch()
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=_START_SECONDS), wait_for_workers=False)
        world = World(self.num_ranks, store.port, _free_port(), logs, self._poison_empty)
        connections, pids = self._nursery.fork(world)
        self._running = running = _Running(world, store, connections, pids, [0] * self.num_ranks)
        try:
            ready = _collect(connections, _START_SECONDS)
            if len(ready) < self.num_ranks or None in ready.values():
                output = "\n".join(f"rank {rank}:\n{running.output(rank)}" for rank in range(self.num_ranks))
                raise RuntimeError(f"a gloo world of {self.num_ranks} ranks did not start.\n{output}")
        except BaseException:
            self._end()
            raise
        return running

    def _end(self) -> dict[int, int]:
        """Kill the world; returns exit codes by rank."""
        running, self._running = self._running, None
        if running is None or self._nursery is None:
            return {}
        for connection in running.connections:
            connection.close()
        return dict(enumerate(self._nursery.end(running.pids)))


def _collect(connections: list[Connection], seconds: float) -> dict[int, Reply | None]:
    """Replies in the order they came; None for a rank that ended, nothing for one that is late."""
    replies: dict[int, Reply | None] = {}
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    deadline = time.monotonic() + seconds
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[arg-type]
            replies[rank] = reply = _receive(connection)  # type: ignore[arg-type]
            if reply is None or reply.error:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return replies


def _receive(connection: Connection) -> Reply | None:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return None


def _ask_for_stacks(running: _Running, late: list[int]) -> None:
    """Make ranks write the stacks of their threads to their logs, and wait until they have."""
    for rank in late:
        with suppress(ProcessLookupError):
            os.kill(running.pids[rank], STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < deadline and not all("most recent call first" in running.output(rank) for rank in late):
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
