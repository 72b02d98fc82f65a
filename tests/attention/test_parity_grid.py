"""Every mask on every layout, schedule, ring and head degree gives the numbers of one process, in float64.

One test for each layout and mask; a loop inside, whose failure names its case. What always runs has every schedule on
every ring under every head degree, and some case for any two values of any two factors; the other combinations run
with ``pytest -m exhaustive``.
"""

from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from lightning_longctx.sequence.layout import LAYOUTS
from lightning_longctx.testing.tolerances import FLOAT32, FLOAT32_GRAD, FLOAT64
from tests.attention.grid import MASKS, cases, check_case, chosen

EVERYTHING = "documents, window and sinks"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_the_grid(layout, mask):
    for case in chosen(layout, mask):
        check_case(case, torch.float64, FLOAT64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_what_is_chosen_has_all_pairs(layout, mask):
    for first, second in combinations(("schedule", "ring", "head", "kv_heads", "rows"), 2):
        pairs = [{(getattr(case, first), getattr(case, second)) for case in f(layout, mask)} for f in (cases, chosen)]
        assert pairs[0] == pairs[1], (first, second)
    assert {case.keep_kv for case in chosen(layout, mask)} == {False, True}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [name for name in MASKS if name != EVERYTHING])
def test_the_rest_of_the_grid(gloo, layout, mask):
    gloo(2).run(check_half_of_the_rest, layout, mask, timeout=280)


def check_half_of_the_rest(layout, mask):
    """Half of the cases in each of two processes that never talk; sorted, so that plans are made once."""
    rest = sorted(set(cases(layout, mask)) - set(chosen(layout, mask)))
    for case in rest[dist.get_rank() * len(rest) // 2 : (dist.get_rank() + 1) * len(rest) // 2]:
        check_case(case, torch.float64, FLOAT64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_float32(layout, mask):
    for case in cases(layout, mask)[1::36]:
        check_case(case, torch.float32, (FLOAT32, FLOAT32_GRAD))
