"""One rank fails: its own message is shown, the run ends with an error, and no process is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from lightning_longctx.strategy.failure.handling import blame, end_processes, explain
from lightning_longctx.strategy.failure.reports import Report
from tests.launches import ROOT, launch_environment
from tests.strategy.fails_on_one_rank import MESSAGE

PROGRAM = "tests.strategy.fails_on_one_rank"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


MARK = "LONGCTX_TEST_RUN"


def marked(run: str) -> list[int]:
    """Processes that still run and have inherited the mark of a run, whatever session they are in."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            inherited = f"{MARK}={run}".encode() in (entry / "environ").read_bytes().split(b"\0")
            ended = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue  # it has just ended
        if inherited and not ended:
            found.append(int(entry.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("launcher", "where", "rank"),
    [
        pytest.param([], "step", 1, marks=pytest.mark.exhaustive),  # tests/cases/test_failing_rank.py does the same
        ([], "worker", 0),
        (TORCHRUN, "step", 1),
    ],
    ids=str,
)
def test_a_failing_rank_ends_all(launcher: list[str], where: str, rank: int) -> None:
    run = uuid.uuid4().hex
    environment = launch_environment(**{MARK: run})
    command = [sys.executable, *launcher, "-m", PROGRAM, where, str(rank)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT, timeout=240
        )
        assert done.returncode != 0
        assert MESSAGE in done.stdout, done.stdout
        assert f"(on rank {rank} of 2)" in done.stdout, done.stdout
        deadline = time.monotonic() + 20
        while marked(run) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not marked(run)
    finally:
        for process in marked(run):
            os.kill(process, 9)


def test_errors_say_where_and_what() -> None:
    lost = RuntimeError("[...] Connection closed by peer [127.0.0.1]:1234")
    explain(lost, 0, 2)
    assert lost.__notes__ == [
        "(on rank 0 of 2)",
        "Another rank has ended: its own error, printed by that process, is the cause.",
    ]
    plain = ValueError("something else")
    explain(plain, 0, 1)
    assert not hasattr(plain, "__notes__")


OWN = Report("ValueError: head=3")
LOST = Report("RuntimeError: Connection closed by peer", "lost")


def late(place: str, *ranks: int) -> Report:
    return Report("RuntimeError: Timed out waiting", "late", place, ranks)


@pytest.mark.parametrize(
    ("mine", "others", "gone", "expected"),
    [
        (LOST, {2: OWN, 1: LOST}, {2: 22}, ["rank 2 failed: ValueError: head=3"]),
        (
            LOST,
            {2: LOST},
            {0: 1, 3: 33},
            ["rank 3 has ended without a word (process 33): killed, out of memory, or crashed"],
        ),
        (LOST, {1: LOST}, {1: 11}, []),
        (late("the loss axis", 0, 1, 2, 3), {1: OWN}, {}, ["rank 1 failed: ValueError: head=3"]),
        (
            late("the loss axis", 0, 1, 2, 3),
            {1: late("the loss axis", 0, 1, 2, 3), 3: late("the inner ring", 2, 3)},
            {},
            [
                "rank 2, 3 did not come there within the timeout",
                "rank 3 itself waited on the inner ring, with ranks 2, 3",
            ],
        ),
        (late("the loss axis", 0, 1), {1: late("the loss axis", 0, 1)}, {}, []),
        (late("", *()), {}, {}, []),
    ],
)
def test_who_is_to_blame(mine: Report, others: dict[int, Report], gone: dict[int, int], expected: list[str]) -> None:
    found = blame(mine, 0, others, gone)
    assert len(found) == len(expected), found
    assert all(sentence.startswith(start) for sentence, start in zip(found, expected, strict=True)), found
    assert not any(sentence.endswith((".", "?")) for sentence in found)  # a full stop follows


def test_end_processes() -> None:
    code = "import time; time.sleep(60)"
    processes = [subprocess.Popen([sys.executable, "-c", code]), subprocess.Popen(["true"])]
    end_processes(processes, grace=2.0)
    assert [process.wait(timeout=10) == 0 for process in processes] == [False, True]
