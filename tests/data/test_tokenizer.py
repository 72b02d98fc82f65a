"""Bytes as tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.data import ByteTokenizer, Tokenizer
from lightning_longctx.data.tokenizer import token_dtype


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokens = ByteTokenizer().encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(text.encode())
    assert ByteTokenizer().decode(np.append(tokens, np.uint16(256))) == text


def test_byte_tokenizer_keeps_the_contract() -> None:
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


def test_a_cut_character_is_shown_as_such() -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode("aé")[:2]) == "a\ufffd"


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_narrowest_dtype(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)
