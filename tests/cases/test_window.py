"""A sliding window over shards: every query sees exactly its own W keys, itself counted."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx import Degrees, attend
from lightning_longctx.attention import close_ring, open_ring
from lightning_longctx.plan.communication import Communication
from lightning_longctx.sequence import LAYOUTS, SequenceRecord
from lightning_longctx.testing import GlooPool, take_shard
from lightning_longctx.topology import CONTEXT, axis_rank

Pools = Callable[[int], GlooPool]
LENGTH = 16
RINGS = [Degrees(1, 4), Degrees(1, 4, 2), Degrees(1, 4, 1)]
HYBRID = Degrees(1, 2, head=2)


def weights(degrees: Degrees, layout: Any, window: int, schedule: Any, documents: tuple[int, ...]) -> Any:
    """This rank's rows of ``softmax(mask)``, from queries and keys of zero and values that are the unit matrix.

    Also the gradient of the values for an output gradient that is the unit matrix too: the columns.
    """
    rank = dist.get_rank()
    name = open_ring(degrees, rank, timedelta(seconds=60), Communication(schedule))
    place = axis_rank(degrees, rank, *CONTEXT), degrees.head, axis_rank(degrees, rank, "head")
    record = SequenceRecord(LENGTH, layout, degrees.context, degrees.inner, *place, documents=documents, ring=name)
    heads = degrees.head
    nothing = torch.zeros(1, heads, record.num_local_tokens, LENGTH)
    identity = torch.eye(LENGTH).expand(1, heads, LENGTH, LENGTH)
    value = take_shard(identity, record.ranges, 2).contiguous().requires_grad_()
    out = attend(nothing, nothing, value, sequence=record, window=window)
    (dvalue,) = torch.autograd.grad(out, value, take_shard(identity, record.ranges, 2).contiguous())
    close_ring(name)
    held = [position for piece in record.ranges for position in piece]
    return held, out.detach()[0], dvalue[0]


def whole(results: list[Any], index: int) -> Tensor:
    rows = torch.full((results[0][index].shape[0], LENGTH, LENGTH), float("nan"))
    for held, *tensors in results:
        rows[:, held] = tensors[index - 1]
    return rows


def keys_of(query: int, window: int, documents: tuple[int, ...] = ()) -> range:
    """Written out, not taken from a mask of ours."""
    first = max((start for start in documents if start <= query), default=0)
    return range(max(first, query - window + 1), query + 1)


def check(results: list[Any], window: int, documents: tuple[int, ...] = ()) -> None:
    out, dvalue = whole(results, 1), whole(results, 2)
    for query in range(LENGTH):
        seen = keys_of(query, window, documents)
        for head in out:
            assert head[query].nonzero().flatten().tolist() == list(seen)
            torch.testing.assert_close(head[query, list(seen)], torch.full((len(seen),), 1 / len(seen)))
    for head, columns in zip(out, dvalue, strict=True):
        torch.testing.assert_close(columns, head.T)


@pytest.mark.parametrize("window", [4, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degrees", [*RINGS, HYBRID])
def test_the_visible_keys(gloo: Pools, degrees: Degrees, layout: str, window: int) -> None:
    """B09: with four ranks of four tokens, windows of a shard's width and one less."""
    check(gloo(4).run(weights, degrees, layout, window, "auto", ()), window)


@pytest.mark.parametrize("schedule", ["double_ring", "direct", "all_gather"])
@pytest.mark.parametrize("window", [1, 5, 16, 17])
def test_other_widths_on_every_schedule(gloo: Pools, schedule: str, window: int) -> None:
    """B09: from a query alone to more keys than there are."""
    for layout in LAYOUTS:
        check(gloo(4).run(weights, Degrees(1, 4, 2), layout, window, schedule, ()), window)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_ends_where_its_document_begins(gloo: Pools, layout: str) -> None:
    """B09: documents across ranks, of one token and shorter than the window."""
    documents = (0, 6, 7, 9, 16)
    for window in (3, 4):
        check(gloo(4).run(weights, Degrees(1, 4, 2), layout, window, "auto", documents), window, documents)


def test_counts() -> None:
    """B09: what one process sees, by the same numbers."""
    for window, counts in ((4, [1, 2, 3, *[4] * 13]), (3, [1, 2, *[3] * 14])):
        identity = torch.eye(LENGTH)[None, None]
        out = attend(torch.zeros_like(identity), torch.zeros_like(identity), identity, window=window)
        assert (out[0, 0] != 0).sum(-1).tolist() == counts
