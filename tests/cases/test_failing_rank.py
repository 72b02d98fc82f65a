"""One rank of a run from the command line fails: all end soon, with an error, and with its own words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_longctx.strategy.failure.watch import STOPPED
from tests.cases.fails import MESSAGE
from tests.launches import launch_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"),
]
SECONDS = 120.0
FIT = ["-m", "lightning_longctx", "fit", "--model", "tests.cases.fails.Fails", "--data", "tests.cases.fails.Data"]
TRAINER = ["accelerator=cpu", "devices=2", "logger=false", "enable_checkpointing=false", "max_epochs=1"]
STRATEGY = ["--trainer.strategy.init_args.degrees.context", "2"]


def members(session: int) -> list[int]:
    """Processes of a session that still run, DataLoader workers included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of_session = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has just ended
        if int(of_session) == session and state != "Z":
            found.append(int(entry.parent.name))
    return found


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and combined output of a run of two processes, of which none is left."""
    command = [sys.executable, *FIT, *(f"--trainer.{option}" for option in TRAINER), *STRATEGY, *options]
    begun = time.monotonic()
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=launch_environment(), cwd=folder,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = started.communicate(timeout=SECONDS)
        while members(started.pid) and time.monotonic() < begun + SECONDS:
            time.sleep(0.1)
        assert not members(started.pid), output
        return started.returncode, output
    finally:
        for process in members(started.pid):
            os.kill(process, 9)


@pytest.mark.parametrize("where", ["layers", "backward"])
def test_an_error_of_the_second_rank_ends_all(tmp_path: Path, where: str) -> None:
    """B54: the first rank waits for the keys of the second layer, or for its gradients."""
    code, output = run(tmp_path, "--model.where", where)
    assert code != 0
    assert f"ValueError: {MESSAGE}" in output, output
    assert "(on rank 1 of 2)" in output, output


def test_an_error_in_a_collate_worker_of_the_second_rank_ends_all(tmp_path: Path) -> None:
    """B54: the error crosses two processes before anybody can read it."""
    code, output = run(tmp_path, "--data.collate", "true")
    assert code != 0
    assert f"ValueError: {MESSAGE}" in output and "failing_collate" in output, output
    assert "(on rank 1 of 2)" in output, output


def test_a_rank_that_fails_before_the_others_know_it_ends_all(tmp_path: Path) -> None:
    """B54: the first rank waits for it to come, and nothing but the process tells that it will not."""
    code, output = run(tmp_path, "--model.where", "made")
    assert code != 0
    assert MESSAGE in output, output
    assert re.search(r"rank 1 \(process \d+\) failed with exit code \d: the run cannot go on", output), output


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])  # test_killed_ranks kills others
def test_a_rank_that_is_killed_ends_all(tmp_path: Path, rank: int) -> None:
    """B54: a rank without last words, as the kernel takes it when memory is short; the first one has launched all."""
    code, output = run(tmp_path, "--model.where", "killed", "--model.rank", str(rank))
    assert code != 0 and "Error: " in output, output
    assert f"rank {rank} has ended without a word" in output, output


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_rank_that_is_told_to_stop_stops_all(tmp_path: Path, rank: int) -> None:
    """A scheduler's SIGTERM to one process alone, with the exit code that a shell has for it."""
    code, output = run(tmp_path, "--model.where", "terminated", "--model.rank", str(rank))
    assert code == STOPPED, output
    assert f"rank {rank} received SIGTERM: all ranks stop before training batch 2." in output, output
    assert "Traceback" not in output, output
