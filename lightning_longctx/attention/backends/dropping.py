"""Which weights dropout leaves: a hash in 32-bit words, held by int64 tensors, that any kernel can repeat."""

from __future__ import annotations

from torch import Tensor

from lightning_longctx.attention.backends.contract import Dropout

WORD = 0xFFFFFFFF
"""The largest word."""


def mix(words: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit depends on all ("lowbias32" of hash-prospector).

    Args:
        words: int64, each below 2^32.

    Returns:
        The same. Products may leave 63 bits; their low 32 bits are right all the same.
    """
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & WORD
    words = ((words ^ (words >> 15)) * 0x846CA68B) & WORD
    return words ^ (words >> 16)


def keeps(dropout: Dropout) -> Tensor:
    """Which weights stay: bool [B, Hq, Tq, Tk]."""
    first, second = dropout.rows[..., 0, None], dropout.rows[..., 1, None]
    return mix(mix(dropout.keys ^ first) ^ second) >= threshold(dropout.p)


def threshold(p: float) -> int:
    """A weight stays if its word is at least this: it is dropped with probability ``p``, to 2^-32."""
    return min(round(p * 2**32), WORD)
