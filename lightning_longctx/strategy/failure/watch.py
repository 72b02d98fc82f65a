"""Processes of one launch watch each other: what Lightning has launched does not outlive a failure, nor its launcher.

A thread watches, since the main one may be in a collective that never ends. It lets the others speak first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_longctx import _upstream
from lightning_longctx.strategy.failure.handling import GRACE_SECONDS, end_processes
from lightning_longctx.strategy.failure.reports import is_alive

STOPPED = 128 + signal.SIGTERM
"""Exit code of a rank that stopped because all had agreed to: no failure, but the run is not over either."""

PATIENCE_SECONDS = 10.0
"""How long this process may take to end by itself after a failure of another one."""

ORPHAN_SECONDS = 30.0
"""How long a launched process may take after its launcher has ended, which may be after the run."""

LAUNCHER = "LIGHTNING_LONGCTX_LAUNCHER"
_POLL_SECONDS = 0.1


def how_it_ended(code: int) -> str:
    """An exit code of ``subprocess`` in words."""
    if code >= 0:
        return f"failed with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def watch_launched(processes: Sequence[subprocess.Popen], first_rank: int) -> None:
    """End this process and its siblings when one of the launched processes fails.

    Args:
        processes: Launched by this process.
        first_rank: Global rank of this one; theirs follow.
    """

    def watch() -> None:
        while (failed := first_failure(processes)) is None:
            if all(process.poll() is not None for process in processes):
                return
            time.sleep(_POLL_SECONDS)
        process, code = processes[failed], processes[failed].returncode
        what = f"rank {first_rank + 1 + failed} (process {process.pid}) {how_it_ended(code)}"
        _say(f"{what}: the run cannot go on, all its processes on this machine end.")
        end_processes(processes)
        time.sleep(PATIENCE_SECONDS - GRACE_SECONDS)
        os._exit(1)

    _start(watch)


def first_failure(processes: Sequence[subprocess.Popen]) -> int | None:
    """Which process has failed; none while all run, have ended well, or have stopped as agreed."""
    ended = ((index, process.poll()) for index, process in enumerate(processes))
    return next((index for index, code in ended if code not in (None, 0, STOPPED)), None)


def watched(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> _upstream.Launcher | None:
    """Lightning's launcher under watch; None where others have launched this process.

    A process that such a launcher has launched watches it in turn.
    """
    if environment.creates_processes_externally:
        if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0:
            watch_launcher(int(os.environ.get(LAUNCHER, "0")))
        return None
    os.environ[LAUNCHER] = str(os.getpid())
    first_rank = environment.node_rank() * num_processes
    return _upstream.watched_launcher(
        environment, num_processes, num_nodes, partial(watch_launched, first_rank=first_rank)
    )


def watch_launcher(launcher: int) -> None:
    """End this process when that one, which has launched it, has ended; 0 is nobody. Once is enough."""
    if not launcher or any(thread.name == LAUNCHER for thread in threading.enumerate()):
        return

    def watch() -> None:
        while is_alive(launcher):
            time.sleep(_POLL_SECONDS)
        time.sleep(ORPHAN_SECONDS)
        _say(f"process {launcher}, which launched process {os.getpid()}, has ended: this one ends, too.")
        os._exit(1)

    _start(watch)


def _start(watch: Callable[[], None]) -> None:
    threading.Thread(target=watch, daemon=True, name=LAUNCHER).start()


def _say(text: str) -> None:
    print(f"lightning_longctx: {text}", file=sys.stderr, flush=True)
