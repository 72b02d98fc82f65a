"""Where packed documents begin, told from position ids, which restart with every document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Documents = tuple[int, ...]
"""Cumulative lengths of packed documents, ``(0, ..., total)``; empty means that nothing is packed."""


def check_documents(documents: Documents, length: int, num_rows: int = 1) -> None:
    """Raise ``ValueError`` unless ``documents`` is empty, or ascends from 0 to the end and stops at every row's end."""
    if not documents:
        return
    ascending = documents[0] == 0 and all(start < stop for start, stop in pairwise(documents))
    ends = {row * length for row in range(num_rows + 1)}
    if not ascending or documents[-1] != num_rows * length or not ends <= set(documents):
        raise ValueError(
            f"documents with the cumulative lengths {documents} do not fill {num_rows} rows of {length} tokens."
        )


def document_positions(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Position ids of documents packed one after another: each counts from 0, empty ones vanish.

    Args:
        lengths: Tokens of each document.

    Returns:
        [sum of lengths] int64.

    Raises:
        ValueError: A length is negative.
    """
    if any(length < 0 for length in lengths):
        raise ValueError(f"document lengths {list(lengths)} must not be negative.")
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(length, dtype=np.int64) for length in lengths)])


def document_offsets(position_ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Cumulative lengths (``cu_seqlens``) of the documents in one row, or in one contiguous shard of a row.

    A document starts wherever a position is not its predecessor plus one: a rule that also sees documents of one
    token, which a test for falling positions misses. A shard always starts at 0, also in the middle of a document.

    Args:
        position_ids: [T] integers: an array, a list or a tensor on the CPU.

    Returns:
        [number of documents + 1] int32; first 0, last T, strictly ascending.

    Raises:
        ValueError: ``position_ids`` is not one row.
    """
    positions = np.asarray(position_ids)
    if positions.ndim != 1:
        raise ValueError(f"position_ids of shape {positions.shape} must be one row: call this row by row.")
    starts = np.flatnonzero(positions[1:] != positions[:-1] + 1) + 1
    end = [len(positions)] if len(positions) else []
    return np.concatenate([[0], starts, end]).astype(np.int32)
