"""Workers of a loader obey SIGTERM of their rank, and of nobody else, however they are started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_longctx.strategy.failure.worker_signals import outliving

PROGRAM = """
import subprocess
from torch.utils.data import DataLoader
from lightning_longctx.strategy.failure.worker_signals import outliving

def start(worker):
    pass

def exit_code(method):
    options = dict(num_workers=1, prefetch_factor=1, multiprocessing_context=method)
    batches = iter(DataLoader(range(9), worker_init_fn=outliving(start), **options))
    assert int(next(batches)) == 0
    (worker,) = batches._workers
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    worker.join(0.3)
    assert worker.is_alive() and [int(next(batches)) for _ in range(3)] == [1, 2, 3]
    worker.terminate()
    worker.join(20)
    code = worker.exitcode
    worker.kill()
    return code

if __name__ == "__main__":
    print(exit_code("fork"), exit_code("forkserver"))
"""


@pytest.mark.slow
def test_a_worker_ends_when_its_rank_says_so(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["0", "0"], done.stdout + done.stderr


def test_where_there_is_no_worker_nothing_is_masked() -> None:
    started: list[int] = []
    outliving(started.append)(3)
    assert started == [3] and signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
