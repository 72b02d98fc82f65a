"""The callbacks inside real runs: one point per optimizer step, on the loss's axis, the same numbers on every rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_longctx import Degrees
from lightning_longctx.callbacks import GradientNorm, LearningRate, PeakMemory, ThroughputCallback
from tests.callbacks.tiny import TOKENS, Tiny, curves, fit, num_counted

NAMES = {"train_loss", "tokens_per_second", "step_seconds", "grad_norm", "peak_memory_gib_max", "peak_memory_gib_min"}


class Recorder(Callback):
    """Keeps what the callbacks log, step by step; and takes a known time for every micro-batch."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.steps = seconds, []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        time.sleep(self.seconds)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def all_callbacks(**throughput: Any) -> list[Callback]:
    return [ThroughputCallback(**throughput), GradientNorm(), PeakMemory(), LearningRate()]


def run_accumulating(folder: str, degrees: Degrees) -> list[dict[str, float]]:
    recorder = Recorder(seconds=0.02)
    fit(
        folder,
        degrees,
        8 * (degrees.data if isinstance(degrees.data, int) else 1),
        [*all_callbacks(warmup_steps=0), recorder],
        module=Tiny(decay_steps=4),
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        max_epochs=1,
        use_distributed_sampler=False,
    )
    return recorder.steps


def test_every_curve_has_one_point_per_optimizer_step(tmp_path: Path, gloo: Any) -> None:
    by_rank = gloo(2).run(run_accumulating, str(tmp_path), Degrees(context=2))
    assert len(list(tmp_path.glob("events*"))) == 1  # one rank writes
    found = curves(tmp_path)
    assert NAMES <= set(found)
    steps = {name: [step for step, _ in points] for name, points in found.items() if name in NAMES or "lr" in name}
    assert set(map(tuple, steps.values())) == {(0, 1, 2, 3)}, steps
    rate = next(points for name, points in found.items() if name.startswith("lr"))
    assert [value for _, value in rate] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert by_rank[0][-1] == by_rank[1][-1]


def test_tokens_of_a_step_are_those_that_count_in_all_its_micro_batches(tmp_path: Path, gloo: Any) -> None:
    gloo(2).run(run_accumulating, str(tmp_path), Degrees(context=2))
    found = {name: dict(points) for name, points in curves(tmp_path).items()}
    for step in range(4):
        seconds = found["step_seconds"][step]
        # Two micro-batches of at least 0.02 s belong to a step, and the window holds two samples. (The loader's order
        # does not matter: every window of two neighbours has 61 or 57 labels, or one across both.)
        assert seconds > 0.03
        tokens = found["tokens_per_second"][step] * seconds
        assert num_counted([2, 3]) - 2 <= tokens <= num_counted([0, 1]) + 2, tokens
    total = sum(found["tokens_per_second"][step] * found["step_seconds"][step] for step in range(4))
    assert total == pytest.approx(num_counted(list(range(8))), rel=1e-3)


def run_throughput(folder: str, degrees: Degrees) -> list[dict[str, float]]:
    recorder = Recorder()
    fit(folder, degrees, 8, [ThroughputCallback(warmup_steps=0), recorder], log_every_n_steps=4, max_steps=4)
    return recorder.steps


def test_data_ranks_add_and_context_ranks_do_not(tmp_path: Path, gloo: Any) -> None:
    def counted(degrees: Degrees, num_ranks: int) -> float:
        by_rank = gloo(num_ranks).run(run_throughput, str(tmp_path / f"{degrees.context}-{num_ranks}"), degrees)
        last = by_rank[0][-1]
        assert all(steps[-1] == last for steps in by_rank)
        return last["tokens_per_second"] * last["step_seconds"] * 4

    every_sample = num_counted(list(range(8)))
    assert counted(Degrees(context=2), 4) == pytest.approx(every_sample, rel=1e-3)  # 2 data ranks x 4 steps
    half = counted(Degrees(context=4), 4)  # 4 steps of one sample
    assert 4 * (TOKENS - 4) <= half + 0.2 and half <= 4 * (TOKENS - 1) + 0.2


def run_with_validation(folder: str) -> list[float]:
    fit(
        folder,
        Degrees(),
        6,
        [ThroughputCallback(warmup_steps=0)],
        validate=True,
        log_every_n_steps=1,
        val_check_interval=2,
        max_steps=6,
    )
    return [value for _, value in curves(folder)["step_seconds"]]


def test_validation_is_no_training_time(tmp_path: Path, gloo: Any) -> None:
    (seconds,) = gloo(1).run(run_with_validation, str(tmp_path))
    assert len(seconds) == 6 and sum(seconds) < 3 * 0.4, seconds  # three validation runs sleep 0.4 s each


def test_warmup_steps_are_not_counted(tmp_path: Path, gloo: Any) -> None:
    gloo(1).run(run_warmup, str(tmp_path))
    found = curves(tmp_path)
    assert [step for step, _ in found["train_loss"]] == [0, 1, 2, 3]
    assert [step for step, _ in found["tokens_per_second"]] == [2, 3]


def run_warmup(folder: str) -> None:
    fit(folder, Degrees(), 4, [ThroughputCallback(warmup_steps=2)], log_every_n_steps=1, max_steps=4)


def run_norm(folder: str, degrees: Degrees) -> list[float]:
    recorder = Recorder()
    fit(
        folder,
        degrees,
        3,
        [GradientNorm(), recorder],
        log_every_n_steps=1,
        max_steps=3,
        gradient_clip_val=1e-3,
        use_distributed_sampler=False,
    )
    return [step["grad_norm"] for step in recorder.steps]


def test_gradient_norm_is_taken_before_clipping_and_is_that_of_one_process(tmp_path: Path, gloo: Any) -> None:
    (alone,) = gloo(1).run(run_norm, str(tmp_path / "1"), Degrees())
    assert all(norm > 0.1 for norm in alone)  # clipping leaves 0.001
    for rank in gloo(2).run(run_norm, str(tmp_path / "2"), Degrees(context=2)):
        torch.testing.assert_close(rank, alone, rtol=1e-5, atol=0)
