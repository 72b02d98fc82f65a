"""Launched processes and their launcher: none outlives a failure of another, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from lightning_longctx.strategy.failure.reports import is_alive
from lightning_longctx.strategy.failure.watch import STOPPED, first_failure, how_it_ended
from tests.launches import launch_environment

BUSY = "import time; time.sleep(60)"
WATCH_LAUNCHED = f"""
import subprocess, sys, time
from lightning_longctx.strategy.failure import watch
watch.PATIENCE_SECONDS = watch.GRACE_SECONDS + 0.5
children = [subprocess.Popen([sys.executable, "-c", code]) for code in ({BUSY!r}, "import os; os.kill(os.getpid(), 9)")]
print(children[0].pid, flush=True)
watch.watch_launched(children, first_rank=4)
time.sleep(60)
"""
LAUNCH = f"""
import subprocess, sys, time
code = '''
import os, time
from lightning_longctx.strategy.failure import watch
watch.ORPHAN_SECONDS = 0.5
watch.watch_launcher(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
'''
subprocess.Popen([sys.executable, "-c", code])
{BUSY}
"""


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=launch_environment(), start_new_session=True,
    )  # fmt: skip


def assert_ended(process: int) -> None:
    deadline = time.monotonic() + 30
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(process)


def kill(started: subprocess.Popen, *more: int) -> None:
    for process in (started.pid, *more):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    started.wait()


def test_a_launcher_that_waits_ends_with_a_child_that_was_killed() -> None:
    started = start(WATCH_LAUNCHED)
    sibling = 0
    try:
        sibling = int(started.stdout.readline())  # type: ignore[union-attr]
        _, errors = started.communicate(timeout=50)
        assert started.returncode == 1
        assert "rank 6 (process " in errors and "was ended by SIGKILL: the run cannot go on" in errors
        assert_ended(sibling)
    finally:
        kill(started, *([sibling] if sibling else []))


def test_a_launched_process_does_not_outlive_its_launcher() -> None:
    started = start(LAUNCH)
    launched = 0
    try:
        launched = int(started.stdout.readline())  # type: ignore[union-attr]
        assert is_alive(launched)
        kill(started)
        assert_ended(launched)
        assert f"process {started.pid}, which launched process {launched}, has ended" in started.stderr.read()  # type: ignore[union-attr]
    finally:
        kill(started, *([launched] if launched else []))


def test_first_failure() -> None:
    codes = ("raise SystemExit(0)", f"raise SystemExit({STOPPED})", "raise SystemExit(3)")
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    assert [process.wait() for process in processes] == [0, STOPPED, 3]
    assert first_failure(processes[:2]) is None and first_failure(processes) == 2


@pytest.mark.parametrize(
    ("code", "words"), [(1, "failed with exit code 1"), (-9, "was ended by SIGKILL"), (-6, "was ended by SIGABRT")]
)
def test_how_it_ended(code: int, words: str) -> None:
    assert how_it_ended(code) == words


def test_is_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    assert is_alive(process.pid) and is_alive(os.getpid())
    process.kill()
    assert_ended(process.pid)  # before anybody has waited for it
    process.wait()
    assert not is_alive(process.pid)
