"""Shapes of the messages between ranks, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_longctx.plan.attention import AttentionPlan
from lightning_longctx.plan.counts import hop_tokens
from lightning_longctx.plan.steps import Hop


def message_shape(hop: Hop, plan: AttentionPlan, key: Tensor) -> tuple[int, int, int, int]:
    """Of the keys (or the values) in one message: [B, T, Hkv, D]."""
    return (key.shape[0], hop_tokens(hop, plan.ring.parcels), key.shape[1], key.shape[3])


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Size of a tensor."""
    return math.prod(shape) * dtype.itemsize


def kept_memory(plan: AttentionPlan, key: Tensor, dtype: torch.dtype, flat: Tensor) -> dict[Hop, Tensor]:
    """Views [2, B, T, Hkv, D] of a tensor of bytes for every message that is kept for backward: keys, then values."""
    kept: dict[Hop, Tensor] = {}
    start = 0
    for hop in plan.ring.kept(plan.rank):
        shape = (2, *message_shape(hop, plan, key))
        size = num_bytes(shape, dtype)
        kept[hop] = flat[start : start + size].view(dtype).view(shape)
        start += size
    return kept


def kept_bytes(plan: AttentionPlan, key: Tensor, dtype: torch.dtype) -> int:
    """Size of that tensor."""
    return sum(num_bytes((2, *message_shape(hop, plan, key)), dtype) for hop in plan.ring.kept(plan.rank))
