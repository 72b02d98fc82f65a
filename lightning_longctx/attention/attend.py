"""The one public entry: queries meet the keys of the whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx.attention.op import ring_attention
from lightning_longctx.sequence.record import SequenceRecord

_made = 0


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, sequence: SequenceRecord | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention over a sequence whose tokens are spread over the context ranks.

    ``softmax(scale * q k^T + causal mask) v``, as ``F.scaled_dot_product_attention(..., is_causal=True,
    enable_gqa=True)`` gives on the whole sequence; every rank of the context group must call it, in the same order.

    Args:
        query: [B, Hq, T, D], this rank's T tokens, in local order; float64, float32, bfloat16 or float16.
        key: [B, Hkv, T, D]; Hkv divides Hq, and query heads share key/value heads in groups.
        value: [B, Hkv, T, D].
        sequence: The batch's ``sequence`` entry, which says where tokens live. None: all tokens are here.
        scale: Factor on the scores; None is ``D ** -0.5``.

    Returns:
        [B, Hq, T, D] in the inputs' dtype (autocast's, where that is on).

    Raises:
        ValueError: Shapes or dtypes do not fit each other or the record, before anything is sent.
    """
    global _made
    _made += 1
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    record = sequence or SequenceRecord(length=query.shape[2])
    check_inputs(query, key, value, record)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, _ = ring_attention(query, key, value, record.encode(), record.ring, record.backend, scale)
    return out


def calls_made() -> int:
    """Calls of ``attend`` in this process so far: a step that shards sequences but never gets here is a wrong one."""
    return _made


def check_inputs(query: Tensor, key: Tensor, value: Tensor, record: SequenceRecord) -> None:
    """Raise ``ValueError`` unless the tensors fit each other and the record."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"attention needs [batch, heads, tokens, width] tensors, got {shapes}.")
    if key.shape != value.shape or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"key and value must have one shape, and the query's batch and width; got {shapes}.")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"{key.shape[1]} key/value heads do not divide {query.shape[1]} query heads: {shapes}.")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value need one dtype, got {query.dtype}, {key.dtype}, {value.dtype}.")
    if query.shape[2] != key.shape[2] or query.shape[2] != record.num_local_tokens:
        raise ValueError(
            f"this rank holds {record.num_local_tokens} of the sequence's {record.length} tokens, but got {shapes}. "
            "Attention takes the same tokens as queries and as keys: no cache, no cross-attention, nothing cut or "
            "joined along the sequence between collate and here."
        )
