"""Loaders of torchdata and litdata: data ranks read different samples, ranks of a group the same, and all go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees
from tests.strategy.streams import Run, several, write_litdata

Pools = Callable[[int], GlooPool]
COUNT, OPTIONS = 16, {"max_epochs": 2}


def run_of(kind: str, workers: int, folder: Path) -> Run:
    pytest.importorskip(kind.split()[0])
    if kind == "litdata":
        write_litdata(folder, COUNT)
    return Run(COUNT, kind=kind, workers=workers, folder=folder, degrees=Degrees(data=2, context=2), options=OPTIONS)


@pytest.mark.parametrize(
    ("kind", "workers", "steps"),
    [
        ("torchdata rows", 0, 5),
        ("torchdata lines", 1, 8),
        ("torchdata lines", 0, 11),
        ("litdata", 0, 8),
        ("litdata", 2, 11),
    ],
)
def test_fit_and_go_on(gloo: Pools, tmp_path: Path, kind: str, workers: int, steps: int) -> None:
    run, path = run_of(kind, workers, tmp_path / "data"), tmp_path / "a.ckpt"
    tasks = [(run, None, None), (run.but(options=OPTIONS | {"max_steps": steps}), None, path), (run, path, None)]
    results = gloo(4).run(several, tasks)
    for whole, first, rest in results:
        assert first + rest == whole and len(first) == steps
    wholes: list[Any] = [whole for whole, _, _ in results]
    assert wholes[0] == wholes[1] and wholes[2] == wholes[3]
    for epoch in range(2):
        mine, theirs = ([step[3][0] for step in whole if step[0] == epoch] for whole in (wholes[0], wholes[2]))
        assert sorted(mine + theirs) == list(range(COUNT))
    if kind in ("torchdata rows", "litdata"):
        assert [step[3] for step in wholes[0][:8]] != [step[3] for step in wholes[0][8:]]
