"""Which global ranks talk to each other: never a position in a group taken for a rank."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.communication import SCHEDULES, Communication
from lightning_longctx.sequence import LAYOUTS, SequenceRecord
from lightning_longctx.topology import CONTEXT, LOSS, Degrees, axis_groups, axis_rank, group_of
from lightning_longctx.topology.degrees import Placement

INNER, OUTER = ("context_inner",), ("context_outer",)


def groups(degrees: Degrees, *axes: str) -> set[tuple[int, ...]]:
    return set(axis_groups(degrees, *axes))


def test_the_double_ring_of_a_tensor_parallel_world() -> None:
    """B27: world 8, tensor 2 innermost, context 4 as two inner rings of 2."""
    degrees = Degrees(data=1, context=4, inner_ring=2, tensor=2)
    assert groups(degrees, *INNER) == {(0, 2), (4, 6), (1, 3), (5, 7)}
    assert groups(degrees, *OUTER) == {(0, 4), (2, 6), (1, 5), (3, 7)}
    assert groups(degrees, *CONTEXT) == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert groups(degrees, "tensor") == {(0, 1), (2, 3), (4, 5), (6, 7)}


@pytest.mark.parametrize(
    ("degrees", "inner", "outer"),
    [
        (Degrees(1, 4, 2), {(0, 1), (2, 3)}, {(0, 2), (1, 3)}),
        (Degrees(1, 4), {(0, 1, 2, 3)}, {(0,), (1,), (2,), (3,)}),
        (Degrees(1, 4, 1), {(0,), (1,), (2,), (3,)}, {(0, 1, 2, 3)}),
        (Degrees(1, 2, tensor=2), {(0, 2), (1, 3)}, {(0,), (1,), (2,), (3,)}),
        (Degrees(2, 4, 2), {(0, 1), (2, 3), (4, 5), (6, 7)}, {(0, 2), (1, 3), (4, 6), (5, 7)}),
        (Degrees(1, 8, 2), {(0, 1), (2, 3), (4, 5), (6, 7)}, {(0, 2, 4, 6), (1, 3, 5, 7)}),
        (Degrees(1, 8, 4), {(0, 1, 2, 3), (4, 5, 6, 7)}, {(0, 4), (1, 5), (2, 6), (3, 7)}),
        (Degrees(1, 4, 2, head=2), {(0, 2), (1, 3), (4, 6), (5, 7)}, {(0, 4), (1, 5), (2, 6), (3, 7)}),
        (Degrees(1, 4, 2, 2, 1, "context_first"), {(0, 1), (2, 3), (4, 5), (6, 7)}, {(0, 2), (1, 3), (4, 6), (5, 7)}),
    ],
)
def test_inner_and_outer_groups(degrees: Degrees, inner: set[Any], outer: set[Any]) -> None:
    """B27: small worlds, written out."""
    assert groups(degrees, *INNER) == inner
    assert groups(degrees, *OUTER) == outer


def test_sixteen_in_rings_of_four_behind_another_data_rank() -> None:
    """B27: the second data rank's groups start at 16."""
    degrees = Degrees(data=2, context=16, inner_ring=4)
    second = [group for group in axis_groups(degrees, *INNER) if group[0] >= 16]
    assert second == [(16, 17, 18, 19), (20, 21, 22, 23), (24, 25, 26, 27), (28, 29, 30, 31)]
    assert group_of(degrees, 22, *OUTER) == (18, 22, 26, 30)
    assert group_of(degrees, 22, *CONTEXT) == tuple(range(16, 32))
    assert group_of(degrees, 22, "data") == (6, 22)
    assert [axis_rank(degrees, 22, *axes) for axes in (CONTEXT, INNER, OUTER, ("data",))] == [6, 2, 1, 1]


SHAPES = st.builds(
    lambda data, windows, inner, *others: Degrees(data, windows * inner, inner, *others),
    *[st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)],
    st.sampled_from(get_args(Placement)),
)
ORDERS = {
    "head_first": ["data", "context_outer", "context_inner", "head", "tensor"],
    "context_first": ["data", "head", "context_outer", "context_inner", "tensor"],
}


def coordinates(degrees: Degrees) -> dict[int, tuple[int, ...]]:
    """Place of every global rank on every axis in their order, the last axis counting fastest."""
    sizes: dict[str, Any] = {
        "data": degrees.data,
        "context_outer": degrees.context // degrees.inner,
        "context_inner": degrees.inner,
        "head": degrees.head,
        "tensor": degrees.tensor,
    }
    return dict(enumerate(product(*(range(sizes[axis]) for axis in ORDERS[degrees.placement]))))


@given(SHAPES, st.sampled_from([INNER, OUTER, CONTEXT, LOSS, ("data",), ("head",), ("tensor",), ("head", "tensor")]))
def test_a_group_differs_on_its_axes_only(degrees: Degrees, axes: tuple[str, ...]) -> None:
    """B27: any shape, against the definition of a mesh."""
    places = coordinates(degrees)
    inside = [index for index, axis in enumerate(ORDERS[degrees.placement]) if axis in axes]
    seen = []
    for group in axis_groups(degrees, *axes):
        outside = {tuple(place for i, place in enumerate(places[rank]) if i not in inside) for rank in group}
        along = [tuple(places[rank][i] for i in inside) for rank in group]
        assert len(outside) == 1
        assert along == sorted(product(*({place[i] for place in places.values()} for i in inside)))
        assert list(group) == sorted(group)  # as torch.distributed orders its groups
        assert all(group_of(degrees, rank, *axes) == group for rank in group)
        assert [axis_rank(degrees, rank, *axes) for rank in group] == list(range(len(group)))
        seen += group
    assert sorted(seen) == list(places)


@given(SHAPES, st.sampled_from(LAYOUTS), st.sampled_from(SCHEDULES), st.data())
def test_messages_stay_in_their_group(degrees: Degrees, layout: Any, schedule: Any, data: st.DataObject) -> None:
    """B27: an inner hop joins ranks of one inner ring; an outer one of a double ring, the same place of two."""
    members = data.draw(st.sampled_from(axis_groups(degrees, *CONTEXT)))
    place = data.draw(st.integers(0, degrees.context - 1))
    record = SequenceRecord(8 * degrees.context, layout, degrees.context, degrees.inner, place)
    plan = plan_attention(record, communication=Communication(schedule))
    for hop in (*plan.forward.sent, *plan.backward.sent):
        source, target = members[hop.source], members[hop.target]
        assert source != target and source == members[place]
        assert target in group_of(degrees, source, *CONTEXT)
        if hop.channel in ("kv_inner", "grad_inner"):
            assert target in group_of(degrees, source, *INNER)
        elif schedule == "double_ring" and hop.channel == "kv_outer":
            assert target in group_of(degrees, source, *OUTER)


def test_tensor_and_data_ranks_never_meet_in_a_ring() -> None:
    """B27: the ranks of a sequence are strided by head x tensor, and shifted by the data rank."""
    degrees = Degrees(data=2, context=8, inner_ring=4, head=2, tensor=2)
    strided = [range(32 * data + offset, 32 * data + offset + 32, 4) for data in range(2) for offset in range(4)]
    assert axis_groups(degrees, *CONTEXT) == tuple(map(tuple, strided))


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("context", "inner", "head"), [(8, 2, 2), (8, 4, 2), (16, 4, 2), (8, 2, 4), (16, 4, 1)])
def test_both_placements_by_counting(data: int, tensor: int, context: int, inner: int, head: int) -> None:
    """B27: rings of (8, 2), (8, 4) and (16, 4) behind another data rank, with tensor ranks innermost."""
    size = context * head * tensor
    for placement, ring_step, head_step in (("head_first", head, 1), ("context_first", 1, context)):
        degrees = Degrees(data, context, inner, head, tensor, placement)  # type: ignore[arg-type]
        for d, t, h, c in product(range(data), range(tensor), range(head), range(context)):
            ring = [d * size + (h * head_step + place * ring_step) * tensor + t for place in range(context)]
            window = c - c % inner
            assert list(group_of(degrees, ring[c], *CONTEXT)) == ring
            assert list(group_of(degrees, ring[c], *INNER)) == ring[window : window + inner]
            assert list(group_of(degrees, ring[c], *OUTER)) == ring[c % inner :: inner]
            assert [axis_rank(degrees, ring[c], *axes) for axes in (CONTEXT, ("head",), ("tensor",))] == [c, h, t]
