"""Tensor ranks share every matrix, and the numbers are still those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.runs import Run, distance, train_all
from tests.parity.test_training import check

COMMON: dict[str, Any] = dict(vocab=33, length=61, steps=3, accumulate=3, clip=0.3, optimizer="sgd")
"""A vocabulary and a length that do not divide, windows of three micro-batches, unequal tokens, clipping."""
RUNS = [
    Run(tied=True, sinks=True, windows=(16, None), documents="unlike", **COMMON),
    Run(qk_norm=True, dropout=0.3, recompute=True, **{**COMMON, "optimizer": "adamw"}),
]
DEGREES = {
    "tensor 2": (2, dict(tensor=2), "replicate", RUNS),
    "data 2 x tensor 2, fsdp": (4, dict(data=2, tensor=2), "fsdp", RUNS[1:]),
    "data 2 x context 2 x tensor 2": (8, dict(data=2, context=2, tensor=2), "replicate", RUNS[:1]),
    "context 2 x head 2 x tensor 2, fsdp": (8, dict(context=2, head=2, tensor=2), "fsdp", RUNS[1:]),
    "context 4 (2x2) x tensor 2": (8, dict(context=4, inner_ring=2, tensor=2), "replicate", RUNS[:1]),
}


@pytest.fixture(scope="module")
def alone(gloo):
    """Each run in one process."""
    return dict(zip(RUNS, gloo(1).run(train_all, RUNS, timeout=280)[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", list(DEGREES))
def test_the_same_numbers_as_one_process(gloo, alone, degrees):
    world, options, sharding, chosen = DEGREES[degrees]
    runs = [replace(run, degrees=options, sharding=sharding) for run in chosen]
    for run, result in zip(runs, gloo(world).run(train_all, runs, timeout=280)[0], strict=True):
        check(result, alone[replace(run, degrees={}, sharding="replicate")], run)


def test_bfloat16_errs_as_on_one_process(gloo):
    """Sums are rounded once more where ranks cut them; the distance of the weights from float32's is about the same."""
    wide = Run(**{**COMMON, "accumulate": 1})
    narrow = replace(wide, precision="bf16-mixed")
    [exact, rounded] = gloo(1).run(train_all, [wide, narrow], timeout=100)[0]
    [spread] = gloo(4).run(train_all, [replace(narrow, degrees=dict(context=2, tensor=2))], timeout=100)[0]
    assert spread.losses == pytest.approx(exact.losses, rel=1e-3)
    assert distance(rounded, exact) > 0
    assert distance(spread, exact) == pytest.approx(distance(rounded, exact), rel=0.5)


ON_EIGHT = {name: entry[1:3] for name, entry in DEGREES.items() if entry[0] == 8}
ON_EIGHT["hsdp 2 x 4, data 2 x context 4"] = (dict(data=2, context=4), "hsdp")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("degrees", list(ON_EIGHT))
@pytest.mark.parametrize("quickstart", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_twenty_steps_on_eight_processes(gloo, degrees, quickstart, tied):
    options, sharding = ON_EIGHT[degrees]
    run = Run(**{**COMMON, "steps": 20, "length": 125, "tied": tied, "quickstart": quickstart})
    [expected] = gloo(1).run(train_all, [run], timeout=900)[0]
    spread = replace(run, degrees=options, sharding=sharding, shard_ranks=4 if sharding == "hsdp" else "auto")
    [result] = gloo(8).run(train_all, [spread], timeout=900)[0]
    check(result, expected, spread)
