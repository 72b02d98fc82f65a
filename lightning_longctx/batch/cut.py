"""Take out of every entry the tokens that one rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.sequence.ranges import Ranges
from lightning_longctx.sequence.record import SequenceRecord


def cut_entries(whole: Mapping[str, Any], dims: Mapping[str, int | None], record: SequenceRecord) -> dict[str, Any]:
    """Cut padded entries once, each on its own dim.

    Args:
        whole: Entries of the full batch.
        dims: The sequence dim of each; ``None`` leaves it whole.
        record: Says what the rank holds.

    Raises:
        ValueError: Rows hold other tokens than each other, and an entry has no dim for rows.
    """
    if record.num_ranks * record.head == 1:
        return {key: value.contiguous() if dims[key] is not None else value for key, value in whole.items()}
    rows = record.row_ranges
    local = [_positions(ranges) for ranges in (rows if len(set(rows)) > 1 else rows[:1])]
    return {
        key: value if (dim := dims[key]) is None else _taken(key, value, dim, local, record.layout)
        for key, value in whole.items()
    }


def _positions(ranges: Ranges) -> Tensor:
    pieces = (torch.arange(piece.start, piece.stop, piece.step) for piece in ranges)
    return torch.cat([torch.zeros(0, dtype=torch.int64), *pieces])


def _taken(key: str, value: Tensor, dim: int, local: list[Tensor], layout: str) -> Tensor:
    """The positions of ``local`` on ``dim``, for all rows or for each.

    Copies: a view would take the whole sequence along through a worker's shared memory.
    """
    if len(local) == 1:
        return value.index_select(dim, local[0].to(value.device))
    if dim == 0 or value.shape[dim - 1] != len(local):
        raise ValueError(
            f"batch entry {key!r} of shape {tuple(value.shape)} has no dim of {len(local)} rows directly before its "
            f"sequence dim {dim}, but under layout={layout} every row keeps other tokens, because documents differ "
            f"from row to row. Give it one ([{len(local)}, S, ...]), or use layout=zigzag."
        )
    rows = zip(value.unbind(dim - 1), local, strict=True)
    return torch.stack([row.index_select(dim - 1, places.to(value.device)) for row, places in rows], dim=dim - 1)
