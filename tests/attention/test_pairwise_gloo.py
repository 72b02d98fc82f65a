"""The grid between real processes: every two values of any two factors meet in some case."""

import random
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from lightning_longctx.plan.communication import SCHEDULES
from lightning_longctx.sequence.layout import LAYOUTS
from lightning_longctx.testing.tolerances import FLOAT64
from tests.attention.grid import HEADS, LENGTH, MASKS, RINGS, ROWS, WIDTH, Case, expected, planned_bytes, sinks_for
from tests.attention.grid import tensors_of as whole_tensors
from tests.attention.ring_calls import ring_attention
from tests.attention.whole import check, join

FACTORS = {
    "layout": LAYOUTS,
    "mask": tuple(MASKS),
    "schedule": SCHEDULES,
    "ring": tuple(RINGS),
    "head": (1, 2, 4),
    "kv_heads": (8, 2, 1),
    "rows": ROWS,
    "keep_kv": (False, True),
    "placement": ("head_first", "context_first"),
    "ways": ("memory", "sockets", "both"),
}
"""``both``: half of the ranks are on another node."""

CALLS = ("placement", "ways")


def fits(case):
    """At most 8 processes, and rows that differ only where something is packed."""
    ring, head, rows, mask = (case.get(name) for name in ("ring", "head", "rows", "mask"))
    few = ring is None or head is None or RINGS[ring][0] * head <= 8
    return few and not (rows == "unlike" and mask is not None and not MASKS[mask][1])


def all_pairs():
    """Greedy: each case takes, of some random ones that fit, the one with most pairs that no case had before."""
    turns = random.Random(0)
    two_factors = [product(*([(n, v) for v in FACTORS[n]] for n in names)) for names in combinations(FACTORS, 2)]
    missing = {frozenset(pair) for pairs in two_factors for pair in pairs if fits(dict(pair))}
    while missing:
        seed = dict(min(missing, key=sorted_text))
        tries = ({name: turns.choice(values) for name, values in FACTORS.items()} | seed for _ in range(300))
        best = max((case for case in tries if fits(case)), key=lambda case: len(missing & pairs_of(case)))
        missing -= pairs_of(best)
        yield best


def pairs_of(case):
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def sorted_text(pair):
    return sorted(map(str, pair))


CASES = list(all_pairs())


def head_bytes(case, tokens):
    """What a rank sends its head ranks: queries and results, keys and values, and the gradients of all four."""
    numbers = 2 * HEADS // case.head + 2 * max(1, case.kv_heads // case.head)
    return 2 * (case.head - 1) * case.batch * tokens * numbers * WIDTH * 8


@pytest.mark.parametrize(
    "factors", CASES, ids=lambda factors: "-".join(str(v).replace(" ", "") for v in factors.values())
)
def test_pairwise(gloo, factors):
    placement, ways = (factors[name] for name in CALLS)
    case = Case(**{name: value for name, value in factors.items() if name not in CALLS})
    context, inner = RINGS[case.ring]
    degrees = dict(data=1, context=context, inner_ring=inner, head=case.head, placement=placement)
    mask, _, _ = MASKS[case.mask]
    dtype = torch.float64
    results = gloo(context * case.head).run(
        ring_attention,
        degrees,
        case.layout,
        whole_tensors(case.kv_heads, case.batch, dtype),
        sinks=sinks_for(case, dtype),
        mask=(mask.causal, mask.window),
        communication=replace(case.mesh.communication, shared_memory=ways != "sockets"),
        nodes=2 if ways == "both" else 1,
        documents=case.documents,
        num_rows=case.num_rows,
    )
    check(join(results), expected(case, dtype), FLOAT64)
    planned = planned_bytes(case, dtype)
    for record, _, sent in results:
        heads = sent.pop("head", 0)
        assert sent == planned[record.rank * case.head + record.head_rank]
        assert heads == head_bytes(case, LENGTH // context // case.head)
