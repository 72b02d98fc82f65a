"""SIGTERM in the workers of a loader: a scheduler sends it to them, too, while their rank still needs their batches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import NamedTuple


class OutliveSigterm(NamedTuple):
    """A ``worker_init_fn`` that lets only the rank itself end its workers.

    PyTorch's workers die of a SIGTERM from outside, and that raises in the rank wherever it happens to be: it could not
    stop together with the others.

    Args:
        start: The ``worker_init_fn`` that the loader had.
    """

    start: Callable[[int], object]

    def __call__(self, worker: int) -> None:
        """In a worker, before its first batch."""
        rank = multiprocessing.parent_process()  # not os.getppid(): that may be a fork server
        if rank is not None and hasattr(signal, "sigwaitinfo"):  # where a signal tells who has sent it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_obey, args=(rank.pid,), daemon=True).start()
        self.start(worker)


def outliving(start: Callable[[int], object]) -> OutliveSigterm:
    """The same ``worker_init_fn``, which outlives SIGTERM; safe to call again with the result."""
    return start if isinstance(start, OutliveSigterm) else OutliveSigterm(start)


def _obey(rank: int | None) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)  # as PyTorch's own handler
