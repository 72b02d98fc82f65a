"""Twenty batches of a real model: the same losses, gradient norms and weights as one process, whatever the degrees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_longctx.testing.tolerances import relative_error
from tests.parity.runs import Result, Run, train_all

DEGREES = {
    "context 2": (2, dict(context=2)),
    "context 4 flat": (4, dict(context=4)),
    "context 4 as 2x2": (4, dict(context=4, inner_ring=2)),
    "data 2 x context 2": (4, dict(data=2, context=2)),
}
ONE_BY_ONE, BY_THREES = dict(accumulate=1, steps=20), dict(accumulate=3, steps=7)
RUNS = [
    *(Run(optimizer=o, **pace) for pace in (ONE_BY_ONE, BY_THREES) for o in ("adamw", "sgd")),
    *(Run(optimizer=o, plain=True, **pace) for pace, o in ((ONE_BY_ONE, "sgd"), (BY_THREES, "adamw"))),
    Run(optimizer="sgd", clip=0.1, **ONE_BY_ONE),
]


@pytest.fixture(scope="module")
def alone(gloo):
    """Each run in one process."""
    return dict(zip(RUNS, gloo(1).run(train_all, RUNS, timeout=280)[0], strict=True))


def check(result: Result, expected: Result, run: Run) -> None:
    assert len(result.losses) == run.steps
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    assert result.norms == pytest.approx(expected.norms, rel=1e-5)
    for name, weight in expected.weights.items():
        if run.optimizer == "sgd":
            torch.testing.assert_close(result.weights[name], weight, rtol=1e-5, atol=1e-6, msg=f"{run}: {name}")
        else:  # AdamW turns rounding of tiny gradients into whole steps of single elements
            assert relative_error(result.weights[name], weight) < 1e-5, f"{run}: {name}"


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("degrees", list(DEGREES))
def test_the_same_numbers_as_one_process(gloo, alone, degrees, layout):
    world, options = DEGREES[degrees]
    chosen = {"zigzag": RUNS, "striped": [RUNS[0], RUNS[3]], "contiguous": [RUNS[1], RUNS[2]]}[layout]
    runs = [replace(run, degrees=options, layout=layout) for run in chosen]
    results = gloo(world).run(train_all, runs, timeout=280)[0]
    for run, result in zip(runs, results, strict=True):
        check(result, alone[replace(run, degrees={}, layout="zigzag")], run)
