"""Degrees fit the world and the heads, or say what would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_longctx.topology import CONTEXT, Degrees, axis_groups


def test_data_takes_what_is_left() -> None:
    assert Degrees(context=4, inner_ring=2).resolve(8).shape == (2, 2, 2, 1, 1)
    assert Degrees(data=2, head=2).resolve(4).shape == (2, 1, 1, 2, 1)
    resolved = Degrees(context=4, inner_ring=2, head=2, placement="context_first").resolve(16)
    sizes = {"data": 2, "head": 2, "context_outer": 2, "context_inner": 2, "tensor": 1}
    assert dict(zip(resolved.axes, resolved.shape, strict=True)) == sizes


@pytest.mark.parametrize(
    ("degrees", "world", "message"),
    [
        (Degrees(context=3), 4, r"context=3 .* does not divide the 4 processes"),
        (Degrees(data=3, context=2), 4, r"data=3 x context=2 .* = 6, but this run has 4 processes"),
    ],
)
def test_degrees_that_do_not_multiply(degrees: Degrees, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        degrees.resolve(world)


@pytest.mark.parametrize("option", ["data", "context", "inner_ring", "head", "tensor"])
@pytest.mark.parametrize("value", [0, -2, True, 1.5])
def test_degrees_are_positive_integers(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}"):
        Degrees(**{option: value})  # type: ignore[arg-type]


def test_inner_ring_divides_context() -> None:
    with pytest.raises(ValueError, match=r"inner_ring=3 does not divide context=8.*\[1, 2, 4, 8\]"):
        Degrees(context=8, inner_ring=3)


@pytest.mark.parametrize(
    ("option", "heads", "kv_heads", "allowed"),
    [("tensor", (8, 2, 4), None, "tensor=1 or 2"), ("head", (6, 6, 4), None, "head=1 or 2 or 3 or 6")],
)
def test_heads_must_fit(option: str, heads: tuple[int, int, int], kv_heads: None, allowed: str) -> None:
    num_heads, num_kv_heads, degree = heads
    with pytest.raises(ValueError, match=f"{option}={degree} does not fit .*Use {allowed}"):
        Degrees(**{option: degree}).check_heads(num_heads, num_kv_heads)


def test_valid_neighbours_pass() -> None:
    Degrees(tensor=2).check_heads(8, 2)
    Degrees(head=2).check_heads(6, 6)
    Degrees(head=4).check_heads(8, 2)  # two copies of each key/value head


def test_double_ring_groups_under_tensor_ranks() -> None:
    degrees = Degrees(data=1, context=4, inner_ring=2, tensor=2)
    assert axis_groups(degrees, "context_inner") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert axis_groups(degrees, "context_outer") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_placement_decides_who_are_neighbours() -> None:
    heads, ring = {(0, 1), (2, 3), (4, 5), (6, 7)}, ((0, 2, 4, 6), (1, 3, 5, 7))
    head_first = Degrees(data=1, context=4, inner_ring=2, head=2)
    assert set(axis_groups(head_first, "head")) == heads and axis_groups(head_first, *CONTEXT) == ring
    context_first = replace(head_first, placement="context_first")
    assert axis_groups(context_first, *CONTEXT) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert axis_groups(context_first, "context_inner") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert axis_groups(context_first, "head") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_unknown_placement() -> None:
    with pytest.raises(ValueError, match=r"placement='ring_first' is unknown.*head_first.*context_first"):
        Degrees(placement="ring_first")  # type: ignore[arg-type]


def test_unknown_axes() -> None:
    with pytest.raises(ValueError, match="ring"):
        axis_groups(Degrees(data=1), "ring")
