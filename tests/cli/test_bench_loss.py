"""``bench loss``: nothing is timed that computes something else, and what is measured is written down."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.nn.functional as F  # noqa: N812

from lightning_longctx.cli.bench.command import main
from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.loss import LossBench
from lightning_longctx.cli.bench.loss_systems import LossCase, check_systems, loss_systems
from lightning_longctx.cli.bench.rows import COLUMNS

SMALL = LossCase(vocab=40, tokens=64, width=8, dtype="float32")


@pytest.mark.parametrize("option", ["vocab", "tokens", "width", "tile_tokens", "repeats", "warmup"])
def test_options_out_of_range(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0 must be at least {2 if option == 'vocab' else 1}"):
        LossBench(**{option: 0})
    with pytest.raises(ValueError, match="csv=/nowhere/at/all.csv is no file in a folder that exists"):
        LossBench(csv="/nowhere/at/all.csv")


def test_peers_need_a_torch_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(ValueError, match="peers=True: this torch has no linear_cross_entropy"):
        LossBench(peers=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_systems_agree_on_every_dtype(dtype: str) -> None:
    systems = loss_systems(7, peers=dtype == "float32" and hasattr(F, "linear_cross_entropy"))
    check_systems(systems, LossCase(40, 64, 8, dtype))


def test_a_system_that_computes_something_else_is_refused() -> None:
    systems = loss_systems(None, peers=False)
    tiled = systems["tiled"]
    with pytest.raises(WrongResultError, match="tiled: the sum is off by"):
        check_systems(systems | {"tiled": lambda *given: tiled(*given) * 1.001}, SMALL)
    with pytest.raises(WrongResultError, match="tiled: the gradient of the matrix is off by"):
        check_systems(systems | {"tiled": lambda states, weight, labels: wrong(tiled, states, weight, labels)}, SMALL)


def wrong(tiled, states, weight, labels):
    """The right sum; its gradient of the matrix is half of what it should be."""
    return tiled(states, weight.detach() + (weight - weight.detach()) / 2, labels)


def test_the_command_prints_a_table_and_writes_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = SimpleNamespace(vocab=4096, tokens=4096, width=16)
    options = [f"--{name}={value}" for name, value in vars(sizes).items()]
    main(["loss", *options, "--repeats=2", "--tile_tokens=64", f"--csv={tmp_path}/loss.csv"])
    with (tmp_path / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and [row["system"] for row in rows] == ["untiled", "tiled"]
    assert {row["layout"] for row in rows} == {"vocab:4096"} and float(rows[0]["efficiency"]) == 1
    untiled, tiled = (int(row["peak_growth_bytes"]) for row in rows)
    assert tiled < untiled / 4 and untiled > 2 * 4096 * 4096 * 4
    assert "untiled" in capsys.readouterr().out
