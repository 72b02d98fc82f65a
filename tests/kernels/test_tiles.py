"""The schedule of a launch: every visible pair once, whole runs without a mask, the longest work first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.kernels.tiles import checked_tiles, schedule

CAUSAL = (0, 40, 0, 40, -40, 0)


@st.composite
def tables(draw):
    """Queries, keys, and tiles of which no two show one pair: rectangles in separate columns of keys."""
    num_queries, num_keys = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    cuts = sorted(draw(st.sets(st.integers(1, num_keys), max_size=6)))
    tiles = []
    for k_start, k_stop in zip([0, *cuts], [*cuts, num_keys], strict=True):
        q_start = draw(st.integers(0, num_queries))
        q_stop = draw(st.integers(q_start, num_queries))
        lo = draw(st.integers(-80, 80))
        tiles.append((q_start, q_stop, k_start, k_stop, lo, draw(st.integers(lo, 80))))
    return tuple(draw(st.permutations(tiles))), (num_queries, num_keys)


def pairs_of(table, sizes):
    """Who sees whom, [queries, keys]."""
    mask = torch.zeros(sizes, dtype=torch.int64)
    for q_start, q_stop, k_start, k_stop, lo, hi in table:
        offset = torch.arange(k_stop - k_start) - torch.arange(q_stop - q_start)[:, None]
        mask[q_start:q_stop, k_start:k_stop] += (lo < offset) & (offset <= hi)
    return mask


def pairs_of_schedule(plan, sizes, blocks, by_key):
    """What a kernel computes, as a kernel does it."""
    found = torch.zeros(sizes[0] + blocks[0], sizes[1] + blocks[1], dtype=torch.int64)
    query, key = torch.arange(sizes[0] + blocks[0])[:, None], torch.arange(sizes[1] + blocks[1])

    def square(outer, inner):
        q, k = (inner, outer) if by_key else (outer, inner)
        return slice(q * blocks[0], (q + 1) * blocks[0]), slice(k * blocks[1], (k + 1) * blocks[1])

    for block in plan.order.tolist():
        for first, stop in plan.runs[plan.run_starts[block] : plan.run_starts[block + 1]].tolist():
            for inner in range(first, stop):
                found[square(block, inner)] += 1
        for inner, first, stop in plan.visits[plan.visit_starts[block] : plan.visit_starts[block + 1]].tolist():
            seen = torch.zeros_like(found, dtype=torch.bool)
            assert stop > first, "a visit without a tile"
            for q_start, q_stop, k_start, k_stop, below, above in plan.tiles[plan.members[first:stop]].tolist():
                inside = (query >= q_start) & (query < q_stop) & (key >= k_start) & (key < k_stop)
                seen |= inside & (key - query > below) & (key - query <= above)
            assert seen[square(block, inner)].any(), "a visit that sees nothing"
            found[square(block, inner)] += seen[square(block, inner)]
    # What runs show past the last row of the outer side is never stored.
    assert found[sizes[0] :].sum() == 0 or not by_key
    assert found[:, sizes[1] :].sum() == 0 or by_key
    return found[: sizes[0], : sizes[1]]


@given(tables(), st.sampled_from([(16, 16), (16, 4), (4, 16)]), st.booleans())
def test_every_visible_pair_is_computed_once(drawn, blocks, by_key):
    table, sizes = drawn
    plan = schedule(table, sizes, blocks, by_key)
    num_blocks = -(-sizes[by_key] // blocks[by_key])
    assert sorted(plan.order.tolist()) == list(range(num_blocks))
    assert torch.equal(pairs_of_schedule(plan, sizes, blocks, by_key), pairs_of(table, sizes))


def test_a_causal_square_is_runs_and_a_diagonal():
    plan = schedule((CAUSAL,), (40, 40), (8, 8))
    assert plan.runs.tolist() == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert plan.visits[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert plan.order.tolist() == [4, 3, 2, 1, 0]
    assert plan.run_starts.tolist() == [0, 0, 1, 2, 3, 4]


def test_a_long_sequence_has_a_short_schedule():
    """Two lists of one entry per block, however many key blocks: a run is a range."""
    tokens = 2**20
    plan = schedule(((0, tokens, 0, tokens, -tokens, 0),), (tokens, tokens), (128, 64))
    assert len(plan.runs) == tokens // 128 - 1 and len(plan.visits) == 2 * tokens // 128


def test_tiny_documents_share_a_visit():
    """64 documents of 2 tokens: one product of blocks each for 128 queries, not 64."""
    table = tuple((2 * i, 2 * i + 2, 2 * i, 2 * i + 2, -2, 0) for i in range(64))
    plan = schedule(table, (128, 128), (128, 64))
    assert len(plan.visits) == 2 and len(plan.members) == 64


def test_a_window_leaves_far_blocks_out():
    plan = schedule(((0, 4096, 0, 4096, -256, 0),), (4096, 4096), (64, 64))
    assert (plan.visit_starts.diff() <= 2).all()
    assert plan.runs.tolist() == [[max(0, block - 3), block] for block in range(1, 64)]


def test_nothing_to_see():
    plan = schedule(((0, 7, 0, 8, 7, 9), (3, 3, 0, 8, -9, 9), (0, 7, 0, 8, 2, 2)), (7, 8), (16, 16))
    assert len(plan.runs) == len(plan.visits) == len(plan.tiles) == 0
    assert schedule((), (0, 8), (16, 16)).order.tolist() == []


@pytest.mark.parametrize("tile", [(0, 8, 0, 4, -8, 3), (0, 4, 0, 9, -4, 8), (-1, 4, 0, 4, -4, 3), (0, 4, -2, 4, -4, 3)])
def test_a_tile_over_the_edge_is_refused(tile):
    with pytest.raises(ValueError, match=r"reaches over 7 queries or 8 keys"):
        schedule((tile,), (7, 8), (16, 16))


def test_too_many_tokens_for_32_bit_differences():
    with pytest.raises(ValueError, match="at most 1073741824"):
        checked_tiles((), (2**30 + 1, 4))


def test_bands_are_as_tight_as_the_lengths():
    """Bands may come unbounded; differences of 32 bits must hold them."""
    tiles = checked_tiles(((0, 5, 0, 6, -(2**40), 2**40),), (5, 6))
    assert tiles.tolist() == [[0, 5, 0, 6, -5, 5]]
