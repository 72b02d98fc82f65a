"""Packed documents, windows and sinks through a whole model: the same numbers as one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_longctx.plan.communication import Communication
from tests.parity.runs import Run, train_all
from tests.parity.test_training import check

# 250 tokens divide by nothing here, so that shards are uneven, or padded under head ranks.
SMALL = Run(optimizer="sgd", steps=5, length=250)
RUNS = {
    "alike": replace(SMALL, documents="alike", windows=(24, None), sinks=True),
    "unlike": replace(SMALL, documents="unlike", windows=(24, None), sinks=True),
    "adamw": replace(SMALL, documents="unlike", optimizer="adamw", accumulate=2),
    "window": replace(SMALL, windows=(40, 1), sinks=True),
}
DEGREES = {
    "context 2": (2, dict(context=2)),
    "context 4 as 2x2": (4, dict(context=4, inner_ring=2)),
    "head 2 x context 2": (4, dict(head=2, context=2)),
    "context 2 x head 2, context first": (4, dict(head=2, context=2, placement="context_first")),
    "data 2 x context 2": (4, dict(data=2, context=2)),
}
LAYOUTS = ["zigzag", "contiguous", "striped", "document_zigzag", "balanced", "auto"]
SCHEDULES = [Communication("double_ring", keep_kv=True), Communication("direct"), Communication("all_gather")]


@pytest.fixture(scope="module")
def alone(gloo):
    """Each run in one process."""
    return dict(zip(RUNS, gloo(1).run(train_all, list(RUNS.values()), timeout=200)[0], strict=True))


def compare(gloo, alone, degrees: str, runs: dict[str, Run]) -> None:
    world, options = DEGREES[degrees]
    spread = [replace(run, degrees=options) for run in runs.values()]
    results = gloo(world).run(train_all, spread, timeout=200)[0]
    for name, run, result in zip(runs, spread, results, strict=True):
        check(result, alone[name], run)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degrees", ["context 2", "context 4 as 2x2", "head 2 x context 2"])
def test_documents_windows_and_sinks(gloo, alone, degrees, layout):
    names = list(RUNS) if layout in ("document_zigzag", "auto") else ["alike", "unlike"]
    compare(gloo, alone, degrees, {name: replace(RUNS[name], layout=layout) for name in names})


@pytest.mark.parametrize("degrees", ["context 2 x head 2, context first", "data 2 x context 2"])
def test_other_places_of_the_ring(gloo, alone, degrees):
    chosen = [("alike", "zigzag"), ("unlike", "document_zigzag"), ("window", "contiguous")]
    compare(gloo, alone, degrees, {name: replace(RUNS[name], layout=layout) for name, layout in chosen})


@pytest.mark.parametrize("communication", SCHEDULES, ids=lambda choice: choice.schedule)
def test_ways_of_communicating(gloo, alone, communication):
    runs = {name: replace(RUNS[name], communication=communication) for name in ("alike", "unlike")}
    compare(gloo, alone, "context 4 as 2x2", runs)


def test_fully_sharded_parameters(gloo, alone):
    run = replace(RUNS["unlike"], layout="document_zigzag", sharding="fsdp")
    compare(gloo, alone, "context 2", {"unlike": run})
