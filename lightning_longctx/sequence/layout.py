"""Which global positions each context rank holds, as ascending ranges.

A rank's local order is the global order, so one rule gives every mask on every layout (see ``plan.tiles``).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

LayoutName = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(LayoutName)

Ranges = tuple[range, ...]
"""What one rank holds: ascending, disjoint ranges of global positions, in local order."""


def layout_ranges(layout: LayoutName, length: int, num_ranks: int) -> tuple[Ranges, ...]:
    """Cut ``length`` positions among ``num_ranks`` ranks; shards differ by at most one token.

    * ``contiguous``: rank r holds one block. Unbalanced under a causal mask.
    * ``zigzag``: rank r holds chunks r and 2P-1-r of 2P, so every rank has the same causal work.
    * ``striped``: rank r holds positions r, r+P, r+2P, ... (Striped Attention, arXiv 2311.09431).

    Leftover tokens of a length that does not divide go to ranks round-robin.

    Returns:
        For each rank its non-empty ranges (none at all if there are fewer tokens than ranks).

    Raises:
        ValueError: Unknown layout, negative length or no ranks.
    """
    if length < 0 or num_ranks < 1:
        raise ValueError(f"cannot lay out {length} tokens over {num_ranks} ranks.")
    if layout == "striped":
        shards = [(range(rank, length, num_ranks),) for rank in range(num_ranks)]
    elif layout == "contiguous":
        chunks = _chunks(length, num_ranks)
        shards = [(chunk,) for chunk in chunks]
    elif layout == "zigzag":
        chunks = _zigzag_chunks(length, num_ranks)
        shards = [(chunks[rank], chunks[-1 - rank]) for rank in range(num_ranks)]
    else:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {LAYOUTS}.")
    return tuple(tuple(piece for piece in shard if len(piece)) for shard in shards)


def padding_multiple(layout: LayoutName, context: int, head: int = 1, tensor: int = 1) -> int:
    """Length multiple that makes all shards even: ``context * lcm(2 if zigzag else 1, head * tensor)``."""
    return context * math.lcm(2 if layout == "zigzag" else 1, head * tensor)


def padded_length(length: int, multiple: int) -> int:
    """``length`` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def _chunks(length: int, count: int) -> list[range]:
    base, extra = divmod(length, count)
    starts = [index * base + min(index, extra) for index in range(count + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def _zigzag_chunks(length: int, num_ranks: int) -> list[range]:
    base, extra = divmod(length, 2 * num_ranks)
    # Leftovers visit ranks 0, 1, ... with their early chunks, then again with their late ones.
    early = [base + (rank < extra) for rank in range(num_ranks)]
    late = [base + (num_ranks + rank < extra) for rank in range(num_ranks)]
    chunks, start = [], 0
    for size in early + late[::-1]:
        chunks.append(range(start, start + size))
        start += size
    return chunks
