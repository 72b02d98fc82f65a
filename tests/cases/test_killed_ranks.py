"""kill -9 of any rank at any moment, also within a save: all end, say who is lost, and the run goes on as if nothing.

Bit for bit, since training is deterministic on one layout.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_longctx.models.atomic import DRAFTS
from tests.cases.survivors import (
    NUM_RANKS,
    NUM_STEPS,
    STEPS_PER_SAVE,
    TIMEOUT,
    World,
    forkserver,
    newest,
    start,
    step_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"),
]
RUN_SECONDS = 120.0


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    return forkserver()


@pytest.fixture(scope="module")
def uninterrupted(server: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return weights_of(server, tmp_path_factory.mktemp("uninterrupted"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # ten kills leave a hundred checkpoints


def weights_of(server: ForkServerContext, folder: Path) -> dict[str, Tensor]:
    """Of a run that nobody disturbs."""
    world = start(server, folder)
    try:
        assert world.wait(RUN_SECONDS) == [0] * NUM_RANKS, world.log(0)
    finally:
        world.end()
    return torch.load(folder / "weights", weights_only=True)


def kill(world: World, rank: int, step: int, in_save: bool, milliseconds: float) -> None:
    """Kill a rank once the run has come to a step, or to a save after that, and a little later."""
    deadline, drafts = time.monotonic() + RUN_SECONDS, world.folder / "saved" / DRAFTS
    while (world.step < step or (in_save and not drafts.exists())) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(milliseconds / 1000)
    process = world.processes[rank]
    assert process.exitcode is None and process.pid is not None, world.log(rank)
    os.kill(process.pid, signal.SIGKILL)


def moments(count: int) -> list[tuple[int, int, bool, float]]:
    """Rank, step, whether in a save, milliseconds after that: drawn once and for all; each rank is hit, saves often."""
    draw = random.Random(4711)
    return [
        (index % NUM_RANKS, draw.randrange(NUM_STEPS - 8), index % 2 == 1, draw.uniform(0, 30))
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("rank", "step", "in_save", "milliseconds"),
    [pytest.param(*moment, marks=pytest.mark.exhaustive if i > 1 else ()) for i, moment in enumerate(moments(10))],
)
def test_a_killed_run_goes_on_as_if_nothing(
    server: ForkServerContext,
    uninterrupted: dict[str, Tensor],
    folder: Path,
    rank: int,
    step: int,
    in_save: bool,
    milliseconds: float,
) -> None:
    world = start(server, folder)
    try:
        kill(world, rank, step, in_save, milliseconds)
        killed = time.monotonic()
        codes = world.wait(TIMEOUT + 20)
        assert time.monotonic() < killed + TIMEOUT + 20 and None not in codes and 0 not in codes, codes
        for other in range(NUM_RANKS):
            if other != rank:
                log = world.log(other)
                assert f"(on rank {other} of {NUM_RANKS})" in log and f"rank {rank} has ended without a word" in log, (
                    log
                )
    finally:
        world.end()
    saved = newest(folder)
    assert saved is not None or step < STEPS_PER_SAVE
    again = weights_of(server, folder)
    first = int((folder / "steps").read_text().split()[0])
    assert first == (0 if saved is None else step_of(saved))
    assert again.keys() == uninterrupted.keys()
    for name, weight in uninterrupted.items():
        assert torch.equal(again[name], weight), name
