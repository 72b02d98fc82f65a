"""A process that has imported torch and Lightning once and forks ranks on request.

Importing them takes seconds for each rank; a fork takes milliseconds and shares the memory. So a pool can throw a
world away after every failure instead of trying to repair it. The nursery has one thread and runs no tensor operation,
which is what makes the fork safe; it is the parent of all ranks and so the one that can end them without mistaking
their ids.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

from lightning_longctx.testing.messages import World

_PRELOAD = ("numpy", "torch", "torch.distributed.fsdp", "torch.distributed.tensor", "lightning.pytorch")
_BODY = "import sys; sys.path[:] = {path!r}; from lightning_longctx.testing.nursery import main; main({descriptor})"
# Another launcher's variables would make Lightning follow that one; World.environment sets torch's own for each rank.
_FOREIGN = ("TORCHELASTIC_", "SLURM_", "PL_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_")
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Nursery:
    """Starts the forking process (needs ``os.fork``); several pools may share one.

    Everything it forked ends with it, and it ends when this process does, however that happens: it notices that the
    other end of its socket has gone.
    """

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self._control = Connection(here.detach())
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BODY.format(path=sys.path, descriptor=there.fileno())],
            pass_fds=[there.fileno()],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the ranks in order
        )
        there.close()

    def fork(self, world: World) -> tuple[list[Connection], list[int]]:
        """Fork the ranks of a world; returns a connection to each and their process ids."""
        pairs = [socket.socketpair() for _ in range(world.num_ranks)]
        try:
            self._control.send(world)
            for _, theirs in pairs:
                send_handle(self._control, theirs.fileno(), self._process.pid)
        except OSError as error:
            raise self._ended() from error
        pids = self._receive()
        for _, theirs in pairs:
            theirs.close()
        return [Connection(ours.detach()) for ours, _ in pairs], pids

    def end(self, pids: Sequence[int]) -> list[int]:
        """Kill ranks and what they started.

        Returns:
            Exit codes (negative: the signal); of a rank that had ended before, its own.
        """
        try:
            self._control.send(list(pids))
        except OSError as error:
            raise self._ended() from error
        return self._receive()

    def close(self) -> None:
        """End the process and all that it forked."""
        self._control.close()
        self._process.wait(timeout=30)
        self._log.close()

    def _receive(self) -> list[int]:
        try:
            return self._control.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> RuntimeError:
        self._log.seek(0)
        return RuntimeError("the process that forks ranks has ended:\n" + self._log.read().decode(errors="replace"))


def main(descriptor: int) -> None:
    """Body of the forking process: serve orders from a socket until it closes."""
    control = Connection(descriptor)
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in the ranks then neither visit nor copy what was imported here
    pids: set[int] = set()
    while True:
        try:
            order = control.recv()
        except (EOFError, ConnectionError):
            break
        if isinstance(order, World):
            born = _fork_world(order, control)
            pids.update(born)
            control.send(born)
        else:
            pids.difference_update(order)
            control.send(_end(order))
    _end(sorted(pids))


def _fork_world(world: World, control: Connection) -> list[int]:
    handles = [recv_handle(control) for _ in range(world.num_ranks)]
    born = [_fork(world, rank, handles, control) for rank in range(world.num_ranks)]
    for handle in handles:
        os.close(handle)
    return born


def _fork(world: World, rank: int, handles: list[int], control: Connection) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # A rank that held an end of another's socket would hide that one's death.
        control.close()
        for other, handle in enumerate(handles):
            if other != rank:
                os.close(handle)
        from lightning_longctx.testing.worker import serve

        serve(world, rank, Connection(handles[rank]), parent)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: gloo sometimes aborts while its process group is destroyed, and this is a copy of the nursery.
        os._exit(code)


def _end(pids: Sequence[int]) -> list[int]:
    for pid in pids:
        # A rank leads a process group, so its DataLoader workers go too; just after the fork it does not lead one yet.
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    kept |= dict.fromkeys(_ONE_THREAD, "1")
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Without it gloo looks up the host's name, which need not resolve.
        kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return kept
