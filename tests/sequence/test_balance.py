"""The balanced layout: even tokens, about even work, and as few cuts as that takes."""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_longctx.sequence.balance import balanced_ranges, num_pairs
from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.ranges import Ranges


def packed(lengths: list[int]) -> Documents:
    return tuple(accumulate(lengths, initial=0))


def exponential(mean: int, total: int, seed: int) -> list[int]:
    """Long-tailed lengths, multiples of 8, that fill ``total``."""
    draw, lengths = random.Random(seed), []
    while (left := total - sum(lengths)) > 0:
        lengths.append(max(8, min(int(draw.expovariate(1 / mean)) // 8 * 8, left)))
    return lengths


def parts(documents: Documents, shard: Ranges) -> list[tuple[int, int, int]]:
    """(document's start, first, last + 1 position within it) of everything a rank holds."""
    found = []
    for piece in shard:
        index, at = bisect_right(documents, piece.start) - 1, piece.start
        while at < piece.stop:
            start, stop = documents[index], min(documents[index + 1], piece.stop)
            found.append((start, at - start, stop - start))
            index, at = index + 1, stop
    return found


def imbalance(documents: Documents, shards: list[Ranges]) -> float:
    work = [sum(num_pairs(*ends) for _, *ends in parts(documents, shard)) for shard in shards]
    return max(work) * len(work) / sum(work)


def num_cuts(documents: Documents, shards: list[Ranges]) -> int:
    return sum(len(parts(documents, shard)) for shard in shards) - (len(documents) - 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 9))
def test_every_position_has_one_rank_and_ranks_hold_even_shares(lengths, num_ranks):
    total = sum(lengths)
    shards = balanced_ranges(packed(lengths), num_ranks)
    held = [[position for piece in shard for position in piece] for shard in shards]
    assert [len(positions) for positions in held] == [
        total // num_ranks + (r < total % num_ranks) for r in range(num_ranks)
    ]
    assert sorted(sum(held, [])) == list(range(total))
    assert all(positions == sorted(positions) for positions in held)
    assert shards == balanced_ranges(packed(lengths), num_ranks), "all ranks must agree"


def test_documents_that_fit_are_not_cut():
    documents = packed([1024] * 64)
    shards = balanced_ranges(documents, 8)
    assert num_cuts(documents, shards) == 0
    assert imbalance(documents, shards) == 1.0


@pytest.mark.parametrize("mean", [1024, 256, 64])
@pytest.mark.parametrize("seed", range(5))
def test_packed_documents_are_even_with_few_cuts(mean, seed):
    documents = packed(exponential(mean, 16384, seed))
    shards = balanced_ranges(documents, 2)
    assert imbalance(documents, shards) <= 1.03, "or a cut, where that costs more than it evens out"
    assert num_cuts(documents, shards) <= 4


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_one_document_is_cut_into_two_chunks_a_rank(num_ranks):
    shards = balanced_ranges((0, 65536), num_ranks)
    assert max(len(shard) for shard in shards) <= 2
    assert imbalance((0, 65536), shards) <= 1.001


def test_a_document_too_long_for_one_rank_is_cut_over_few():
    documents = packed([10_000] + [9_000] * 4 + [1_000] * 18)
    shards = balanced_ranges(documents, 8)
    holders = sum(any(start == 0 for start, *_ in parts(documents, shard)) for shard in shards)
    assert holders < 8
    assert imbalance(documents, shards) <= 1.1


def test_ten_thousand_documents_keep_a_collate_worker_no_longer_than_a_step():
    draw = random.Random(1)
    documents = packed([max(1, int(draw.lognormvariate(6, 1.7))) for _ in range(10_000)])
    start = time.process_time()
    shards = balanced_ranges(documents, 64)
    assert time.process_time() - start < 2.0, "0.1 s on an idle machine"
    assert imbalance(documents, shards) <= 1.05
