"""The numbers of a hand-written single-process loop: gradient norms and weights under SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lightning_longctx.testing import FLOAT32, FLOAT32_WEIGHTS, GlooPool, assert_all_close_relative
from lightning_longctx.topology import Degrees
from tests.strategy.modules import by_hand, samples, windows_of
from tests.strategy.runs import Run, build, fit

Pools = Callable[[int], GlooPool]


def assert_same_numbers(gloo: Pools, run: Run, num_ranks: int) -> None:
    torch.manual_seed(7)
    expected = build(replace(run, style="self", seed_by_rank=False))
    data_ranks = num_ranks // (run.degrees.context * run.degrees.head)
    losses, norms = by_hand(expected, windows_of(samples(run.num_samples, run.length), data_ranks * run.accumulate))
    assert len(norms) > 1
    results = gloo(num_ranks).run(fit, run)
    for found, _ in results:
        assert found == pytest.approx(norms, rel=FLOAT32)
    reference = {name: tensor.detach() for name, tensor in expected.state_dict().items()}
    assert_all_close_relative(results[0][1], reference, "weights", FLOAT32_WEIGHTS)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
@pytest.mark.parametrize("context", [1, 2])
def test_two_ranks(gloo: Pools, context: int, sharding: str, accumulate: int) -> None:
    run = Run(Degrees(context=context), sharding=sharding, accumulate=accumulate, num_samples=8)
    assert_same_numbers(gloo, run, 2)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_rank(gloo: Pools, accumulate: int) -> None:
    assert_same_numbers(gloo, Run(accumulate=accumulate), 1)


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_data_and_context(gloo: Pools, sharding: str) -> None:
    assert_same_numbers(gloo, Run(Degrees(context=2), sharding=sharding, accumulate=2, num_samples=8), 4)


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
@pytest.mark.parametrize(
    ("degrees", "world"),
    [
        (Degrees(head=2), 2),
        (Degrees(head=4), 4),
        (Degrees(head=2), 4),
        (Degrees(context=2, head=2), 4),
        (Degrees(context=2, head=2, placement="context_first"), 4),
    ],
)
def test_heads(gloo: Pools, degrees: Degrees, world: int, sharding: str) -> None:
    """Lengths that do not divide, too: head ranks hold equal parts."""
    for length in (16, 13):
        assert_same_numbers(gloo, Run(degrees, sharding=sharding, accumulate=2, num_samples=8, length=length), world)


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_layouts_and_uneven_lengths(gloo: Pools, layout: str) -> None:
    assert_same_numbers(gloo, Run(Degrees(context=2), layout=layout, length=13), 2)


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
@pytest.mark.parametrize("style", ["layers", "manual"])
@pytest.mark.parametrize("tied", [False, True])
def test_ways_to_write_a_module(gloo: Pools, sharding: str, style: str, tied: bool) -> None:
    run = Run(Degrees(context=2), sharding=sharding, style=style, tied=tied)
    assert_same_numbers(gloo, run, 2)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_mean_over_no_token_counts_nothing(gloo: Pools, accumulate: int) -> None:
    """The first samples have labels on one rank only, so the other one divides 0 by 0."""
    assert_same_numbers(gloo, Run(Degrees(context=2), style="masked", accumulate=accumulate), 2)


def test_ranks_that_are_seeded_differently_start_equal(gloo: Pools) -> None:
    assert_same_numbers(gloo, Run(Degrees(context=2), seed_by_rank=True), 2)
