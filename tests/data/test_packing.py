"""Samples against the obvious way: join everything in memory and cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.data import pack
from lightning_longctx.data.packing import Packing, Spans, check_packing

spans_of_documents = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 12)), max_size=8).map(
    lambda pairs: np.array([(start, start + length) for start, length in pairs], dtype=np.int64).reshape(-1, 2)
)
seq_lens = st.integers(2, 9)


def places(packing: Packing) -> list[list[int]]:
    return [[place for piece in packing.pieces(index) for place in piece] for index in range(len(packing))]


@given(spans_of_documents, seq_lens)
def test_concat_cuts_the_joined_documents(spans: Spans, seq_len: int) -> None:
    joined = [place for start, stop in spans.tolist() for place in range(start, stop)]
    whole = len(joined) // seq_len * seq_len
    assert places(pack("concat", spans, seq_len)) == [joined[low : low + seq_len] for low in range(0, whole, seq_len)]


@given(spans_of_documents, seq_lens)
def test_packed_cuts_as_concat_and_keeps_documents_apart(spans: Spans, seq_len: int) -> None:
    packed, concat = pack("packed", spans, seq_len), pack("concat", spans, seq_len)
    assert places(packed) == places(concat)
    assert (packed.isolated, concat.isolated, pack("document", spans, seq_len).isolated) == (True, False, False)


@given(spans_of_documents, seq_lens)
def test_document_cuts_every_document_by_itself(spans: Spans, seq_len: int) -> None:
    expected = []
    for start, stop in spans.tolist():
        parts = [list(range(low, min(low + seq_len, stop))) for low in range(start, stop, seq_len)]
        expected += [part for part in parts if len(part) >= 2]
    assert places(pack("document", spans, seq_len)) == expected


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="seq_len=1 leaves nothing to predict"):
        check_packing("concat", 1)
    with pytest.raises(ValueError, match="packing='best' is unknown.*concat.*document"):
        check_packing("best", 2)  # type: ignore[arg-type]
