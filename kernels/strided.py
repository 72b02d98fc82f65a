"""A tensor as a kernel sees it: where it begins, and how far apart its rows are."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Strided(NamedTuple):
    """A tensor [B, H, T, D] whose last dim is dense; strides in elements."""

    memory: Tensor
    batch: int
    head: int
    token: int


def strided(tensor: Tensor) -> Strided:
    """Of a tensor [B, H, T, D]; one whose last dim is not dense is copied."""
    tensor = tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()
    return Strided(tensor, *tensor.stride()[:3])


def token_major(like: Tensor, width: int) -> Tensor:
    """An empty [B, H, T, width] that lies in memory as projections leave and want it: [B, T, H, width]."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)
