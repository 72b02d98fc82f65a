"""Slots are used again, never by two, and the range shrinks."""

from __future__ import annotations

import torch

from lightning_longctx.memory.offloading.slots import Slots


def test_slots_merge_and_shrink() -> None:
    slots = Slots(alignment=8)
    starts = [slots.take(size) for size in (8, 1, 20, 0)]
    assert starts == [0, 8, 16, 40] and slots.end == 48 and slots.num_taken == 4
    slots.give(8)
    slots.give(0)
    assert slots.take(16) == 0, "neighbours are one"
    slots.give(16)
    assert slots.take(30) == 48, "too large for the hole"
    assert slots.take(9) == 16
    for start in (16, 48, 40, 0):
        slots.give(start)
    assert slots.end == 0 and slots.num_taken == 0
    assert Slots(alignment=8, limit=16).take(17) is None


def test_slots_never_overlap() -> None:
    generator = torch.Generator().manual_seed(0)
    slots, taken = Slots(alignment=4), {}
    for _ in range(2000):
        if taken and torch.rand((), generator=generator) < 0.5:
            start = sorted(taken)[int(torch.randint(len(taken), (), generator=generator))]
            taken.pop(start)
            slots.give(start)
        else:
            size = int(torch.randint(1, 60, (), generator=generator))
            start = slots.take(size)
            assert start is not None
            assert all(start + size <= other or other + length <= start for other, length in taken.items())
            taken[start] = size
        assert slots.end >= max((start + size for start, size in taken.items()), default=0)
    for start in taken:
        slots.give(start)
    assert slots.end == 0
