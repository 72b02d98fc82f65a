"""Replicas of shards: the numbers of one process, also with rounded arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.runs import Result, Run, distance, train_all
from tests.parity.test_training import check

COMMON: dict[str, Any] = dict(length=61, accumulate=3, clip=0.3, vocab=33)
"""A vocabulary and a length that do not divide, windows of three micro-batches, unequal tokens, clipping."""
RUNS = [Run(optimizer="sgd", tied=True, **COMMON), Run(optimizer="adamw", recompute=True, steps=5, **COMMON)]
DEGREES = {
    "hsdp 2 x 2, data 2 x context 2": (4, dict(data=2, context=2), 2, RUNS[1:]),
    "hsdp 2 x 4, data 2 x context 4": (8, dict(data=2, context=4, inner_ring=2), 4, RUNS[:1]),
}


@pytest.fixture(scope="module")
def alone(gloo: Any) -> dict[Run, Result]:
    """Each run in one process."""
    return dict(zip(RUNS, gloo(1).run(train_all, RUNS, timeout=280)[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", list(DEGREES))
def test_the_same_numbers_as_one_process(gloo: Any, alone: dict[Run, Result], degrees: str) -> None:
    """Twenty optimizer steps on eight ranks."""
    world, options, shard_ranks, chosen = DEGREES[degrees]
    runs = [replace(run, degrees=options, sharding="hsdp", shard_ranks=shard_ranks) for run in chosen]
    for run, result in zip(runs, gloo(world).run(train_all, runs, timeout=280)[0], strict=True):
        expected = alone[replace(run, degrees={}, sharding="replicate", shard_ranks="auto")]
        assert max(expected.norms) > 0.3, "clipping is on"
        check(result, expected, run)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_errs_as_on_one_process(gloo: Any, precision: str) -> None:
    """FSDP2 casts nothing and adds gradients in float32: the distance from float32's weights is about the same."""
    wide = Run(optimizer="sgd", steps=4, **COMMON)
    narrow = replace(wide, precision=precision)
    [exact, rounded] = gloo(1).run(train_all, [wide, narrow], timeout=100)[0]
    spread = replace(narrow, degrees=dict(data=2, context=2), sharding="hsdp", shard_ranks=2)
    [found] = gloo(4).run(train_all, [spread], timeout=100)[0]
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {weight.dtype for weight in found.weights.values()} == {dtype}
    assert found.losses == pytest.approx(exact.losses, rel=1e-2)
    assert distance(rounded, exact) > 0
    assert distance(found, exact) < 1.5 * distance(rounded, exact)
