import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.sequence.documents import document_offsets, document_positions


def test_shards_in_the_middle_of_documents_start_at_zero() -> None:
    positions = document_positions([5, 3, 8])
    offsets = [document_offsets(shard).tolist() for shard in np.split(positions, 4)]
    assert offsets == [[0, 4], [0, 1, 4], [0, 4], [0, 4]]


def test_documents_of_one_token_are_seen() -> None:
    assert document_offsets([0, 0, 0, 1]).tolist() == [0, 1, 2, 4]


def test_empty_documents_vanish() -> None:
    positions = document_positions([0, 5, 0, 3, 8, 0])
    assert positions.tolist() == document_positions([5, 3, 8]).tolist()
    assert document_offsets(positions).tolist() == [0, 5, 8, 16]


def test_nothing_at_all() -> None:
    assert document_positions([]).tolist() == []
    assert document_offsets(document_positions([0, 0])).tolist() == [0]


def test_tensors_are_accepted() -> None:
    offsets = document_offsets(torch.tensor([3, 4, 0, 1]))
    assert offsets.dtype == np.int32
    assert offsets.tolist() == [0, 2, 4]


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="one row"):
        document_offsets([[0, 1]])
    with pytest.raises(ValueError, match="negative"):
        document_positions([3, -1])


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(0, 40), st.integers(0, 40))
def test_any_shard_has_the_boundaries_of_the_whole(lengths: list[int], start: int, stop: int) -> None:
    whole = document_positions(lengths)
    shard = whole[start:stop]
    inside = [edge - start for edge in np.cumsum([0, *lengths]) if start < edge < start + len(shard)]
    expected = sorted({0, len(shard), *inside})
    offsets = document_offsets(shard)
    assert offsets.tolist() == expected
    assert offsets.dtype == np.int32
