"""Which documents train, which validate, and in which order: decided by hashes of their names.

A document's fate depends on its own name and the seed alone, so it stays where it is when other documents come or go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_longctx.data.packing import Spans


@dataclass(frozen=True)
class Split:
    """Documents as spans of the token file, in the order in which they are packed."""

    train: Spans
    validation: Spans


def split_documents(
    names: Sequence[str],
    spans: Spans,
    *,
    validation_fraction: float,
    seed: int = 0,
    max_documents: int | None = None,
    max_tokens: int | None = None,
) -> Split:
    """Shuffle documents, keep what the limits allow, and split the rest.

    Args:
        names: Name of each document.
        spans: Where each is in the token file, [n, 2].
        validation_fraction: Expected share of documents that validate.
        seed: Other seeds give other splits and orders.
        max_documents: Keep at most so many documents.
        max_tokens: Keep at most so many tokens; the last document is cut short.

    Returns:
        The two parts; either may be empty.
    """
    order = sorted(range(len(names)), key=lambda index: name_hash("order", seed, names[index]))[:max_documents]
    kept = limit_tokens(spans[order], max_tokens)
    drawn = np.asarray([name_hash("split", seed, names[index]) for index in order[: len(kept)]])
    validates = drawn < validation_fraction
    return Split(kept[~validates], kept[validates])


def limit_tokens(spans: Spans, max_tokens: int | None) -> Spans:
    """The first ``max_tokens`` tokens of documents."""
    if max_tokens is None:
        return spans
    lengths = spans[:, 1] - spans[:, 0]
    before = np.cumsum(lengths) - lengths
    kept = spans[before < max_tokens].copy()
    lengths = np.minimum(lengths, max_tokens - before)[: len(kept)]
    kept[:, 1] = kept[:, 0] + lengths
    return kept


def name_hash(purpose: str, seed: int, name: str) -> float:
    """A number in [0, 1) that looks random but is always the same for these arguments."""
    digest = hashlib.sha256(f"{purpose}:{seed}:{name}".encode("utf-8", errors="surrogateescape")).digest()
    return int.from_bytes(digest[:6]) / (1 << 48)
