"""Stacks hold every tile once, and no two of a stack share a query or a key."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.plan.cuts import halved, window_parts
from lightning_longctx.plan.stacks import Span, Stack, stacked
from lightning_longctx.plan.tiles import Tile


def members(stack):
    """The tiles of a stack."""
    tile = stack.tile
    for i in range(stack.count):
        rows, keys = i * stack.q_step, i * stack.k_step
        yield Tile(tile.q_start + rows, tile.q_stop + rows, tile.k_start + keys, tile.k_stop + keys, tile.lo, tile.hi)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 200), st.integers(0, 80))
def test_every_tile_is_in_one_stack(size, leaf, most_rows, window):
    square = Tile(3, 3 + size, 5, 5 + size, -size, 0)
    tiles = window_parts(square._replace(lo=-window), leaf) if window else halved(square, leaf)
    stacks = stacked(tiles, most_rows)
    assert sorted(tile for stack in stacks for tile in members(stack)) == sorted(tiles)
    for stack in stacks:
        assert stack.count == 1 or stack.count * stack.tile.num_queries <= most_rows
        assert stack.count == 1 or (stack.q_step >= stack.tile.num_queries and stack.k_step >= stack.tile.num_keys)


def test_the_leaves_of_a_causal_square_are_one_stack_and_come_first():
    stacks = stacked(halved(Tile(0, 1024, 0, 1024, -1024, 0), 128), 2048)
    assert stacks[0] == Stack(Tile(0, 128, 0, 128, -128, 0), 8, 128, 128)
    assert stacks[0].queries.is_all_of(1024)
    assert [stack.count for stack in stacks[1:]] == [4, 2, 1]
    assert sum(stack.num_pairs for stack in stacks) == 1024 * 1025 // 2


def test_a_span_knows_when_it_is_everything():
    assert Span(0, 4, 2, 4).is_all_of(8) and Span(0, 8, 1, 0).is_all_of(8)
    assert not any(span.is_all_of(8) for span in (Span(0, 4, 2, 5), Span(4, 4, 1, 0), Span(0, 4, 1, 0)))
    assert Span(2, 4, 3, 10).part(1, 2, 1, 3) == Span(13, 2, 2, 10)
