"""Block sizes: fixed ones for each head width, and the space that ``lightning-longctx bench kernels --tune`` searches.

They are not chosen while training runs: other blocks add in another order, so a choice by the clock would make the last
bits of a run depend on the weather, and ranks of one step could differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal, NamedTuple

import torch

Pass = Literal["forward", "dq", "dkdv"]


class Blocks(NamedTuple):
    """How one kernel is cut and compiled.

    Args:
        queries: Of a block, a power of two from 16 on.
        keys: The same.
        num_warps: Of a program.
        num_stages: Loads that are under way at once.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int


INTERPRETED = Blocks(16, 16, 1, 1)
"""Small, so that tests with few tokens have several blocks."""

_SHARED_BYTES = 227 * 1024
"""Shared memory that one program may use on Hopper."""

_HALF: dict[Pass, dict[int, Blocks]] = {
    "forward": {64: Blocks(128, 64, 8, 3), 128: Blocks(128, 64, 8, 3), 256: Blocks(64, 32, 4, 2)},
    "dq": {64: Blocks(128, 64, 8, 3), 128: Blocks(128, 64, 8, 2), 256: Blocks(64, 32, 4, 1)},
    "dkdv": {64: Blocks(32, 128, 8, 3), 128: Blocks(32, 128, 8, 2), 256: Blocks(32, 32, 4, 2)},
}
"""For bfloat16 and float16, by padded width: the largest that leave registers free, as ``ptxas`` reports for sm_90."""
_FULL: dict[Pass, dict[int, Blocks]] = {
    "forward": {64: Blocks(64, 32, 4, 2), 128: Blocks(32, 32, 4, 2), 256: Blocks(32, 16, 4, 1)},
    "dq": {64: Blocks(32, 32, 4, 2), 128: Blocks(32, 16, 4, 1), 256: Blocks(16, 16, 4, 1)},
    "dkdv": {64: Blocks(32, 32, 4, 1), 128: Blocks(16, 32, 4, 1), 256: Blocks(16, 16, 4, 1)},
}
"""For float32: exact products, which tensor cores do not make."""

_tuned: dict[tuple[Pass, int, bool], Blocks] = {}


def padded_width(width: int) -> int:
    """The power of two that a head of some width is computed as; columns past the width are 0."""
    return max(16, 1 << (width - 1).bit_length())


def blocks_for(which: Pass, width: int, dtype: torch.dtype) -> Blocks:
    """What a kernel uses on a GPU for heads of ``width`` (up to 256)."""
    padded, half = max(64, padded_width(width)), dtype.itemsize == 2
    return _tuned.get((which, padded, half), (_HALF if half else _FULL)[which][padded])


def use_blocks(which: Pass, width: int, dtype: torch.dtype, blocks: Blocks) -> None:
    """Let this process use other blocks from now on."""
    _tuned[which, max(64, padded_width(width)), dtype.itemsize == 2] = blocks


def space(which: Pass, width: int, dtype: torch.dtype) -> Iterator[Blocks]:
    """Blocks worth trying on Hopper, those whose operands fit into shared memory."""
    outer, inner = ((32, 64, 128), (32, 64, 128)) if dtype.itemsize == 2 else ((16, 32, 64), (16, 32))
    for rows, columns, num_warps, num_stages in product(outer, inner, (4, 8), (1, 2, 3, 4)):
        # Rows that stay: q alone, or q and dout, or k and v. Columns that pass: two tensors, for each stage.
        staying = rows * (1 if which == "forward" else 2)
        if (staying + 2 * columns * num_stages) * padded_width(width) * dtype.itemsize <= _SHARED_BYTES:
            sizes = (columns, rows) if which == "dkdv" else (rows, columns)
            yield Blocks(*sizes, num_warps, num_stages)
