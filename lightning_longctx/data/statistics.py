"""What a loss can be compared with."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.data.tokenizer import TokenArray

COUNT_TOKENS = 1 << 22
"""Tokens counted at once: ``bincount`` makes an int64 copy of what it is given."""


def count_tokens(pieces: Iterable[TokenArray], vocab_size: int) -> NDArray[np.int64]:
    """How often each id occurs, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for piece in pieces:
        for start in range(0, len(piece), COUNT_TOKENS):
            counts += np.bincount(piece[start : start + COUNT_TOKENS], minlength=vocab_size)
    return counts


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution that ``counts`` describe.

    Raises:
        ValueError: Nothing was counted.
    """
    total = counts.sum()
    if total == 0:
        raise ValueError("the entropy of no tokens is not defined: count at least one.")
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum())


def unigram_entropy(tokens: TokenArray) -> float:
    """Nats per token that a model pays on ``tokens`` if it knows each id's frequency and nothing else.

    A validation loss well below it shows that the model uses context.

    Raises:
        ValueError: There are no tokens.
    """
    tokens = np.asarray(tokens)
    return entropy(count_tokens([tokens], int(tokens.max(initial=0)) + 1))
