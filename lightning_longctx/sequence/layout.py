"""Which global positions each context rank holds, as ascending ranges.

A rank's local order is the global order, so one rule gives every mask on every layout (see ``plan.tiles``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Literal, get_args

from lightning_longctx.sequence.balance import balanced_ranges
from lightning_longctx.sequence.documents import Documents, check_documents
from lightning_longctx.sequence.ranges import Ranges, chunks, joined, shifted, zigzag_chunks

LayoutName = Literal["contiguous", "zigzag", "striped", "document_zigzag", "balanced"]
LAYOUTS: tuple[str, ...] = get_args(LayoutName)


@lru_cache(maxsize=256)
def layout_ranges(
    layout: LayoutName, length: int, num_ranks: int, documents: Documents = (), num_rows: int = 1
) -> tuple[Ranges, ...]:
    """Cut ``length`` positions among ``num_ranks`` ranks; shards differ by at most one token.

    * ``contiguous``: rank r holds one block. Unbalanced under a causal mask.
    * ``zigzag``: rank r holds chunks r and 2P-1-r of 2P, so every rank has the same causal work.
    * ``striped``: rank r holds positions r, r+P, r+2P, ... (Striped Attention, arXiv 2311.09431).
    * ``document_zigzag``: zigzag within every document: the same work for every rank however documents are packed.
    * ``balanced``: documents stay whole on one rank where they can, which needs no communication; the longest are cut
      by zigzag, and ranks get the same tokens and about the same work (see ``sequence.balance``).

    Leftover tokens of a length that does not divide go to ranks round-robin, continuing over documents.

    Args:
        layout: One of the above. Only the last two look at documents.
        length: Positions in one row.
        num_ranks: Context ranks.
        documents: Cumulative document lengths over all rows; empty is one document a row.
        num_rows: Rows of a batch whose documents differ, one after another: each is cut by itself.

    Returns:
        For each rank its non-empty ranges (none at all if there are fewer tokens than ranks), over
        ``num_rows * length`` positions.

    Raises:
        ValueError: Unknown layout, negative length, no ranks, or documents that do not fill the rows.
    """
    if length < 0 or num_ranks < 1 or num_rows < 1:
        raise ValueError(f"cannot lay out {num_rows} rows of {length} tokens over {num_ranks} ranks.")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {LAYOUTS}.")
    check_documents(documents, length, num_rows)
    rows = []
    for start in (row * length for row in range(num_rows)):
        inside = tuple(offset - start for offset in documents if start <= offset <= start + length)
        shards = _row_ranges(layout, length, num_ranks, inside or (0, length))
        rows.append([shifted(shard, start) for shard in shards])
    return tuple(joined(piece for row in rows for piece in row[rank]) for rank in range(num_ranks))


def padding_multiple(layout: str, context: int, head: int = 1, tensor: int = 1) -> int:
    """Length multiple that makes all shards even: ``context * lcm(2 if zigzag else 1, head * tensor)``."""
    return context * math.lcm(2 if layout == "zigzag" else 1, head * tensor)


def padded_length(length: int, multiple: int) -> int:
    """``length`` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def _row_ranges(layout: LayoutName, length: int, num_ranks: int, documents: Documents) -> Iterable[Ranges]:
    if layout == "striped":
        return [(range(rank, length, num_ranks),) for rank in range(num_ranks)]
    if layout == "contiguous":
        return [(chunk,) for chunk in chunks(length, num_ranks)]
    if layout == "zigzag":
        return zigzag_chunks(range(length), num_ranks)
    if layout == "balanced":
        return balanced_ranges(documents, num_ranks)
    return _document_zigzag(documents, num_ranks)


def _document_zigzag(documents: Documents, num_ranks: int) -> list[Ranges]:
    shards: list[list[range]] = [[] for _ in range(num_ranks)]
    for start, stop in pairwise(documents):
        # Leftovers of all documents before this one have been dealt out to as many ranks.
        dealt = start % num_ranks
        for shard, pieces in zip(shards, zigzag_chunks(range(start, stop), num_ranks, dealt), strict=True):
            shard.extend(pieces)
    return [tuple(shard) for shard in shards]
