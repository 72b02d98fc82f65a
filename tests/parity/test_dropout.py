"""Training with dropout and soft caps: one process's losses and weights, because the same weights are dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.runs import Run, train_all
from tests.parity.test_training import check

SHORT = Run(optimizer="sgd", steps=3, length=128, dropout=0.3)
RUNS = [
    SHORT,
    replace(SHORT, accumulate=2, documents="unlike", windows=(40, None), sinks=True, softcap=2.0),
    replace(SHORT, plain=True),
]
DEGREES = {
    "one process, recomputed": (1, dict(), True),
    "context 4 as 2x2": (4, dict(context=4, inner_ring=2), False),
    "head 2 x context 2, recomputed": (4, dict(head=2, context=2), True),
    "data 2 x context 2": (4, dict(data=2, context=2), False),
}


@pytest.fixture(scope="module")
def alone(gloo):
    """Each run in one process; without dropout too, which must be another run."""
    runs = [*RUNS, replace(SHORT, dropout=0.0)]
    return dict(zip(runs, gloo(1).run(train_all, runs, timeout=280)[0], strict=True))


@pytest.mark.parametrize("degrees", list(DEGREES))
def test_the_same_numbers_as_one_process(gloo, alone, degrees):
    world, options, recompute = DEGREES[degrees]
    runs = [replace(run, degrees=options, recompute=recompute) for run in RUNS]
    for run, result in zip(runs, gloo(world).run(train_all, runs, timeout=280)[0], strict=True):
        check(result, alone[replace(run, degrees={}, recompute=False)], run)


def test_dropout_is_not_ignored(alone):
    without = alone[replace(SHORT, dropout=0.0)]
    assert alone[SHORT].losses != pytest.approx(without.losses, rel=1e-5)
    assert alone[SHORT].norms[0] != pytest.approx(without.norms[0], rel=1e-3)
