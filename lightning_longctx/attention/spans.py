"""Spans of tokens as a batch, and what they become again: views, as long as there is one row."""

from __future__ import annotations

from torch import Tensor

from lightning_longctx.plan.stacks import Span


def batched(tensor: Tensor, span: Span) -> Tensor:
    """The slices of a span along the batch dim.

    Args:
        tensor: [B, H, T, D] or [B, H, T]; B is 1 where the span has several slices.
        span: Which tokens.

    Returns:
        [B * count, H, size, D] or [B * count, H, size]: a view, which can be written to.
    """
    start, size, count, step = span
    if size == tensor.shape[2]:
        return tensor
    if count == 1:
        return tensor.narrow(2, start, size)
    _, heads, _, *width = tensor.shape
    _, by_head, by_token, *by_width = tensor.stride()
    strides = (step * by_token, by_head, by_token, *by_width)
    return tensor.as_strided((count, heads, size, *width), strides, tensor.storage_offset() + start * by_token)


def in_a_row(slices: Tensor) -> Tensor:
    """Slices (or rows of a batch) that follow each other as one: [count, H, size, ...] to [1, H, count * size, ...]."""
    return slices.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)


def taken_apart(row: Tensor, count: int) -> Tensor:
    """Inverse of ``in_a_row``: [1, H, count * size, ...] to [count, H, size, ...]."""
    return row.transpose(1, 2).squeeze(0).unflatten(0, (count, -1)).transpose(1, 2)
