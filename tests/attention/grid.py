"""All combinations of what attention over ranks can vary in, and one case of them on the lockstep loopback."""

import random
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.communication import SCHEDULES, Communication
from lightning_longctx.plan.counts import sent_bytes
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.layout import LAYOUTS
from lightning_longctx.testing.loopback import Mesh, attention_over_ranks
from tests.attention.whole import check, dense, inputs, oracle, sinks_of

LENGTH, HEADS, WIDTH = 32, 8, 4  # 32: every head rank of 8 x 4 ranks holds one token
ONE_ROW = (0, 5, 6, 7, 20, 32)
TWO_ROWS = (*ONE_ROW, 33, 50, 62, 63, 64)

MASKS = {
    "causal": (Mask(), False, False),
    "full": (Mask(causal=False), False, False),
    "window": (Mask(window=5), False, False),
    "documents": (Mask(), True, False),
    "documents and window": (Mask(window=5), True, False),
    "sinks": (Mask(), False, True),
    "documents, window and sinks": (Mask(window=5), True, True),
}
"""``(mask, packed, sinks)``."""

RINGS = {"two": (2, 2), "flat": (4, 4), "2x2": (4, 2), "4x2": (8, 2), "2x4": (8, 4)}
"""``(context ranks, inner ring)``; nodes x ranks of each."""
ROWS = ("1", "2", "unlike")
"""Of a batch; ``unlike``: two, with other documents in each."""
WIDE_RINGS, HEAD_DEGREES, KV_HEADS = ("flat", "2x2", "4x2", "2x4"), (1, 2, 4), (8, 2, 1)


class Case(NamedTuple):
    layout: str
    mask: str
    schedule: str
    ring: str
    head: int
    kv_heads: int
    rows: str
    keep_kv: bool

    @property
    def documents(self):
        if not MASKS[self.mask][1]:
            return ()
        return TWO_ROWS if self.rows == "unlike" else ONE_ROW

    @property
    def num_rows(self):
        return 2 if self.rows == "unlike" else 1

    @property
    def batch(self):
        return 1 if self.rows == "1" else 2

    @property
    def mesh(self):
        communication = Communication(self.schedule, self.keep_kv)
        ring = RINGS[self.ring]
        return Mesh(self.layout, *ring, self.head, self.documents, self.num_rows, communication)


def cases(layout, mask):
    """Every combination of the other factors once, in an order that mixes them and never changes.

    ``keep_kv``, which changes nothing but who sends what when, takes turns instead of doubling the grid.
    """
    turns = random.Random(f"{layout} {mask}")
    combinations = product(SCHEDULES, WIDE_RINGS, HEAD_DEGREES, KV_HEADS, rows_of(mask))
    found = [Case(layout, mask, *factors, keep_kv=turns.random() < 0.5) for factors in combinations]
    turns.shuffle(found)
    return found


def rows_of(mask):
    return ROWS if MASKS[mask][1] else ROWS[:2]


def chosen(layout, mask):
    """One case for every schedule on every ring under every head degree; key/value heads and rows take turns.

    So any two values of any two factors meet in some case. Each layout and mask begins the turns elsewhere.
    """
    first, rows = LAYOUTS.index(layout) + list(MASKS).index(mask), rows_of(mask)
    found = []
    for case in cases(layout, mask):
        ring, head = WIDE_RINGS.index(case.ring), HEAD_DEGREES.index(case.head)
        place = SCHEDULES.index(case.schedule) + ring + head
        turn = KV_HEADS[(first + place) % len(KV_HEADS)], rows[(first + ring + head + place // 3) % len(rows)]
        if (case.kv_heads, case.rows) == turn:
            found.append(case)
    return found


@lru_cache(maxsize=64)
def tensors_of(kv_heads, batch, dtype):
    return inputs(LENGTH, dtype, HEADS, kv_heads, batch, WIDTH)


@lru_cache(maxsize=256)
def expected_of(mask, kv_heads, batch, documents, num_rows, dtype):
    rule, _, has_sinks = MASKS[mask]
    sinks = sinks_of(HEADS, dtype) if has_sinks else None
    return oracle(*tensors_of(kv_heads, batch, dtype), dense(LENGTH, rule, documents, num_rows), sinks)


def sinks_for(case, dtype):
    return sinks_of(HEADS, dtype) if MASKS[case.mask][2] else None


def expected(case, dtype):
    return expected_of(case.mask, case.kv_heads, case.batch, case.documents, case.num_rows, dtype)


def check_case(case, dtype, tolerance):
    """Values, gradients, and that every rank sent exactly what its plan says."""
    try:
        tensors, sinks = tensors_of(case.kv_heads, case.batch, dtype), sinks_for(case, dtype)
        result = attention_over_ranks(*tensors, case.mesh, mask=MASKS[case.mask][0], sinks=sinks)
        check(result[: 4 if sinks is None else 5], expected(case, dtype), tolerance, case)
        assert list(result.sent_bytes) == planned_bytes(case, dtype), case
    except Exception as error:
        error.add_note(f"in {case}")
        raise


def planned_bytes(case, dtype):
    """By context rank and head rank."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = case.batch // case.num_rows  # rows with documents of their own are one after another
    numbers = 2 * rows * max(1, case.kv_heads // case.head) * WIDTH
    counted = []
    for row in case.mesh.records(LENGTH):
        plan = plan_attention(row[0], MASKS[case.mask][0], case.mesh.communication)
        hops = (*plan.forward.sent, *plan.backward.sent)
        sizes = {"key_bytes": numbers * dtype.itemsize, "gradient_bytes": numbers * wide.itemsize}
        counted += [sent_bytes(hops, plan.ring.parcels, plan.ring.inner, **sizes)] * case.head
    return counted
