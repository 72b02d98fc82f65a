"""Every mask on every layout, schedule, ring and head degree gives the numbers of one process, in float64.

One test for each layout and mask; a loop inside, whose failure names its case. A sixth of the cases runs always,
another sixth is marked slow, and the others exhaustive: ``pytest -m exhaustive``.
"""

import pytest
import torch
import torch.distributed as dist

from lightning_longctx.sequence.layout import LAYOUTS
from lightning_longctx.testing.tolerances import FLOAT32, FLOAT32_GRAD, FLOAT64
from tests.attention.grid import MASKS, cases, check_case

EVERYTHING = "documents, window and sinks"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_sixth_of_the_grid(layout, mask):
    for case in cases(layout, mask)[::6]:
        check_case(case, torch.float64, FLOAT64)


@pytest.mark.parametrize(
    "sixths", [pytest.param((1,), marks=pytest.mark.slow), pytest.param((2, 3, 4, 5), marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [name for name in MASKS if name != EVERYTHING])
def test_the_rest_of_the_grid(gloo, layout, mask, sixths):
    gloo(2).run(check_half, layout, mask, sixths, timeout=280)


def check_half(layout, mask, sixths):
    """Half of the cases in each of two processes that never talk; sorted, so that plans are made once."""
    rest = sorted(case for index, case in enumerate(cases(layout, mask)) if index % 6 in sixths)
    for case in rest[dist.get_rank() * len(rest) // 2 : (dist.get_rank() + 1) * len(rest) // 2]:
        check_case(case, torch.float64, FLOAT64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_float32(layout, mask):
    for case in cases(layout, mask)[1::36]:
        check_case(case, torch.float32, (FLOAT32, FLOAT32_GRAD))
