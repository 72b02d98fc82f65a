"""``bench step``: what counts as the same training, and one run of both loops."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from lightning_longctx.cli.bench.bare_loop import BARE, LONGCTX, Steps
from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.rows import COLUMNS
from lightning_longctx.cli.bench.step import StepBench
from lightning_longctx.cli.bench.step_report import summarise
from tests.launches import launch_environment


def steps(seconds: list[float], losses: list[float]) -> Steps:
    return Steps(seconds, losses, [7] * len(seconds))


def test_a_step_is_as_slow_as_its_slowest_rank_and_warm_up_does_not_count():
    losses = [3.0, 2.0, 1.0]
    ranks = [
        {BARE: steps([9.0, 1.0, 2.0], losses), LONGCTX: steps([9.0, 1.0, 1.0], losses)},
        {BARE: steps([9.0, 1.5, 1.0], losses), LONGCTX: steps([9.0, 3.0, 4.0], losses)},
    ]
    pairs = summarise(ranks, 1)
    assert pairs.seconds == {BARE: [1.5, 2.0], LONGCTX: [3.0, 4.0]}
    assert pairs.overhead == pytest.approx(1.0)
    assert pairs.sent[BARE] == [7, 7]


@pytest.mark.parametrize("wrong", [2.1, 2.0001, float("nan")])
def test_other_losses_are_another_training(wrong):
    rank = {BARE: steps([1.0, 1.0], [3.0, 2.0]), LONGCTX: steps([1.0, 1.0], [3.0, wrong])}
    with pytest.raises(WrongResultError, match="they do not train alike"):
        summarise([rank], 1)


@pytest.mark.parametrize("option", ["tokens", "repeats", "warmup"])
def test_options_out_of_range(option):
    with pytest.raises(ValueError, match=f"{option}=0 must be at least"):
        StepBench(**{option: 0})
    with pytest.raises(ValueError, match="csv=/nowhere/at/all.csv is no file in a folder that exists"):
        StepBench(csv="/nowhere/at/all.csv")


@pytest.mark.slow
def test_both_loops_train_alike_and_are_written_down(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(8):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"text number {number}. " * 400)
    (tmp_path / "small.yaml").write_text(
        f"trainer: {{devices: 2}}\n"
        "model: {class_path: lightning_longctx.CausalLM, init_args: {decoder: {width: 32, num_layers: 1}}}\n"
        f"data: {{class_path: lightning_longctx.TextDataModule, init_args: {{path: {tmp_path}/corpus,"
        f" cache_dir: {tmp_path}/cache, validation_fraction: 0}}}}\n"
    )
    recipes = f"[quickstart.yaml,context2.yaml,{tmp_path}/small.yaml]"
    command = [sys.executable, "-m", "lightning_longctx", "bench", "step", "--config", recipes, "--tokens", "256"]
    command += ["--repeats", "2", "--warmup", "1", "--csv", str(tmp_path / "step.csv")]
    done = subprocess.run(
        command, cwd=tmp_path, env=launch_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "overhead" in done.stdout
    with (tmp_path / "step.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["case"], row["system"], row["ranks"], row["tokens"]) for row in rows] == [
        ("step", "bare", "2", "256"),
        ("step", "longctx", "2", "256"),
    ]
    assert rows[0]["bytes_sent_max"] == rows[1]["bytes_sent_max"] != "0"
    assert not (tmp_path / "lightning_logs").exists(), "the bench leaves nothing behind"
