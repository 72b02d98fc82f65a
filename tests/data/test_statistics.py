"""The entropy that a validation loss is compared with."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from lightning_longctx.data import ByteTokenizer, statistics, unigram_entropy


def test_entropy_of_known_distributions() -> None:
    assert unigram_entropy(np.zeros(7, dtype=np.uint16)) == 0
    assert unigram_entropy(np.arange(8, dtype=np.uint32)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([0, 0, 0, 300], dtype=np.uint16)) == pytest.approx(0.5623351446)


def test_entropy_equals_loss_of_a_unigram_model_however_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ByteTokenizer().encode("the quick brown fox jumps over the lazy dog" * 3)
    share = {token: number / len(tokens) for token, number in Counter(tokens.tolist()).items()}
    loss = -sum(math.log(share[token]) for token in tokens.tolist()) / len(tokens)
    monkeypatch.setattr(statistics, "COUNT_TOKENS", 10)
    assert unigram_entropy(tokens) == pytest.approx(loss)


def test_no_tokens_have_no_entropy() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        unigram_entropy(np.array([], dtype=np.uint16))
