"""Splits are deterministic, disjoint, complete, and stable when documents come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.data import Split, split_documents
from lightning_longctx.data.packing import Spans

NAMES = [f"package/file_{index}.py" for index in range(300)]
OFFSETS = np.cumsum([0] + [1 + 7 * index % 50 for index in range(300)])
SPANS = np.stack((OFFSETS[:-1], OFFSETS[1:]), axis=1)


def pairs(spans: Spans) -> list[tuple[int, int]]:
    return [(start, stop) for start, stop in spans.tolist()]


def split(seed: int = 0, fraction: float = 0.2, count: int = 300, **limits: int) -> Split:
    return split_documents(NAMES[:count], SPANS[:count], validation_fraction=fraction, seed=seed, **limits)


def test_every_document_is_in_one_part() -> None:
    parts = split()
    assert sorted(pairs(parts.train) + pairs(parts.validation)) == pairs(SPANS)
    assert 40 <= len(parts.validation) <= 80
    assert pairs(parts.train) != sorted(pairs(parts.train))


def test_the_same_seed_gives_the_same_split_and_another_another() -> None:
    assert pairs(split(1).validation) == pairs(split(1).validation) != pairs(split(2).validation)


def test_a_document_stays_where_it_is_when_others_go() -> None:
    fewer = set(pairs(split(count=200).validation))
    assert fewer == set(pairs(split().validation)) & set(pairs(SPANS[:200]))


def test_fraction_zero_trains_on_everything() -> None:
    assert len(split(fraction=0).validation) == 0
    assert len(split(fraction=0).train) == 300


def test_a_limit_of_documents_keeps_a_part_of_the_split() -> None:
    few, all_ = split(max_documents=50), split()
    assert len(few.train) + len(few.validation) == 50
    assert set(pairs(few.validation)) < set(pairs(all_.validation))


@given(st.integers(1, 9000))
def test_a_limit_of_tokens_is_exact_and_cuts_one_document(max_tokens: int) -> None:
    limited = split(max_tokens=max_tokens)
    kept = pairs(limited.train) + pairs(limited.validation)
    assert sum(stop - start for start, stop in kept) == min(max_tokens, OFFSETS[-1])
    assert len(set(kept) - set(pairs(SPANS))) <= 1
    assert {start for start, _ in kept} <= set(OFFSETS.tolist())


@pytest.mark.parametrize("limit", [{"max_documents": 1}, {"max_tokens": 1}])
def test_one_document_may_leave_a_part_empty(limit: dict[str, int]) -> None:
    parts = split(**limit)
    assert len(parts.train) + len(parts.validation) == 1
