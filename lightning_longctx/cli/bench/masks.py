"""``--mask``: who may see whom, as one word of the command line, and what that means for a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.documents import Documents

Kind = Literal["causal", "full", "window", "documents"]

_STEP = 8
"""Lengths of documents are multiples of this: per-document zigzag of other packages needs twice the ranks to divide."""
_FORMS = "causal, full, window:W or documents:MEAN"


@dataclass(frozen=True)
class BenchMask:
    """A mask of the bench; ``str`` gives back what was parsed.

    Args:
        kind: ``causal``, ``full``, ``window`` (causal, the latest keys) or ``documents`` (causal within each).
        tokens: Keys in the window, the query's own included, or the mean length of documents. 0 where there is none.

    Raises:
        ValueError: The number is missing, superfluous or too small.
    """

    kind: Kind = "causal"
    tokens: int = 0

    def __post_init__(self) -> None:
        # A window of 1 is the value of the query's own token: no attention, and gradients that are nothing but zero.
        least = {"window": 2, "documents": _STEP}.get(self.kind, 0)
        if self.tokens < least or (not least and self.tokens):
            raise ValueError(f"mask={self} makes no sense: {self.kind} takes {_number(self.kind, least)}.")

    def __str__(self) -> str:
        return f"{self.kind}:{self.tokens}" if self.kind in ("window", "documents") else self.kind

    @property
    def mask(self) -> Mask:
        """What depends on positions alone."""
        return Mask(causal=self.kind != "full", window=self.tokens if self.kind == "window" else None)

    def documents(self, length: int) -> Documents:
        """Cumulative lengths of the packed documents in ``length`` tokens; empty if nothing is packed."""
        return (0, *accumulate(document_lengths(length, self.tokens))) if self.kind == "documents" else ()

    def scaled(self, length: int) -> BenchMask:
        """The same kind where a sequence has only ``length`` tokens: windows end inside it, documents are several."""
        if self.kind not in ("window", "documents"):
            return self
        least = _STEP if self.kind == "documents" else 2
        return replace(self, tokens=max(least, min(self.tokens, length // 8)))

    def visible_pairs(self, length: int) -> int:
        """How many (query, key) pairs attention computes in ``length`` tokens."""
        if self.kind == "full":
            return length * length
        if self.kind == "documents":
            return sum(_triangle(stop - start) for start, stop in pairwise(self.documents(length)))
        unseen = max(0, length - self.tokens) if self.kind == "window" else 0
        return _triangle(length) - _triangle(unseen)


def parse_mask(text: str) -> BenchMask:
    """Read the option ``--mask``.

    Args:
        text: ``causal``, ``full``, ``window:W`` or ``documents:MEAN``.

    Raises:
        ValueError: It is none of these; the message says what is.
    """
    kind, colon, number = text.partition(":")
    if kind not in get_args(Kind):
        raise ValueError(f"mask={text!r} is unknown: use {_FORMS}, for example window:1024 or documents:256.")
    if not colon:
        if kind in ("window", "documents"):
            raise ValueError(f"mask={text!r} lacks its number of tokens: use {_FORMS}, for example {kind}:1024.")
        return BenchMask(kind)  # type: ignore[arg-type]
    if not number.isdecimal():
        raise ValueError(f"mask={text!r}: {number!r} is no number of tokens. Use {_FORMS}, for example window:1024.")
    if kind in ("causal", "full"):
        raise ValueError(f"mask={text!r}: {kind} takes no number. Use mask={kind}, or one of {_FORMS}.")
    return BenchMask(kind, int(number))  # type: ignore[arg-type]


def document_lengths(length: int, mean: int) -> tuple[int, ...]:
    """Lengths of packed documents that fill a sequence: long-tailed, as collections of text are.

    Exponential with the given mean, rounded down to multiples of 8 and at least 8; the last one ends with the sequence.
    The same at every call.

    Args:
        length: Tokens of the sequence.
        mean: Tokens of a document, before rounding.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths, left = [], length
    while left > 0:
        # Multiplied in float32: figures compare with those of other programs that draw the same documents.
        drawn = (-mean * torch.log(torch.rand(1, generator=generator))).item()
        rounded = max(_STEP, int(drawn) // _STEP * _STEP) if math.isfinite(drawn) else left
        lengths.append(min(rounded, left))
        left -= lengths[-1]
    return tuple(lengths)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def _number(kind: str, least: int) -> str:
    return f"a number of tokens, at least {least}" if least else "no number"
