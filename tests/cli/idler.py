"""What a rank holds in the tests of ``cli.bench.ranks``. A module of its own, because every rank has to import it."""

from __future__ import annotations

import os
import signal
import time

import torch


class Idler:
    """Says where it is, waits, and fails."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def where(self) -> tuple[int, int, str, int]:
        return self.rank, os.getpid(), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

    def variables(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def fail_on_rank_1(self) -> None:
        if self.rank == 1:
            raise ArithmeticError("one is wrong")
        torch.distributed.barrier()

    def end_on_rank_1(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()

    def core_seconds(self) -> float:
        return time.process_time()

    def pause(self) -> None:
        time.sleep(1.0)
