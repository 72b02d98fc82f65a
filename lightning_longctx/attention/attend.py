"""The one public entry: queries meet the keys of the whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx.attention.exchange import trade_heads_for_tokens, trade_tokens_for_heads
from lightning_longctx.attention.heads import local_sinks
from lightning_longctx.attention.op import ring_attention
from lightning_longctx.attention.rings import find_ring
from lightning_longctx.attention.spans import in_a_row, taken_apart
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.topology.degrees import check_head_degree

_made = 0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sequence: SequenceRecord | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention over a sequence whose tokens are spread over the context and head ranks.

    ``softmax(scale * q k^T + mask) v``, as ``F.scaled_dot_product_attention(..., enable_gqa=True)`` gives on the whole
    sequence; every rank that shares the sequence must call it, in the same order. Packed documents do not see each
    other.

    Args:
        query: [B, Hq, T, D], this rank's T tokens, in local order; float64, float32, bfloat16 or float16.
        key: [B, Hkv, T, D]; Hkv divides Hq, and query heads share key/value heads in groups.
        value: [B, Hkv, T, D].
        sequence: The batch's ``sequence`` entry, which says where tokens live. None: all tokens are here.
        causal: A query sees no later key.
        window: A query sees at most this many keys, itself included; needs ``causal``. None is no limit.
        sinks: [Hq], a learned logit for every query head that takes part in the softmax, but has no value. All of them,
            also where heads are shared among ranks.
        scale: Factor on the scores; None is ``D ** -0.5``.

    Returns:
        [B, Hq, T, D] in the inputs' dtype (autocast's, where that is on).

    Raises:
        ValueError: Shapes, dtypes or options do not fit each other or the record, before anything is sent.
    """
    return attend_masked(query, key, value, Mask(causal, window), sequence=sequence, sinks=sinks, scale=scale)


def attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    sequence: SequenceRecord | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """``attend`` under any mask; arguments as there."""
    global _made
    _made += 1
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    record = sequence or SequenceRecord(length=query.shape[2])
    check_inputs(query, key, value, record)
    check_mask(mask, sinks, query, record)
    # Kernels are called below the check by which PyTorch's own attention makes the last dim dense.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if record.head == 1:
        return _over_context(query, key, value, mask, record, sinks, factor)
    query, key, value = trade_tokens_for_heads(query, key, value, record.ring, record.head)
    if sinks is not None:
        sinks = local_sinks(sinks, record.head, record.head_rank)
    out = _over_context(query, key, value, mask, record, sinks, factor)
    return trade_heads_for_tokens(out, record.ring, record.head)


def _over_context(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, record: SequenceRecord, sinks: Tensor | None, scale: float
) -> Tensor:
    if record.num_rows > 1:
        query, key, value = (in_a_row(tensor) for tensor in (query, key, value))
    ring = find_ring(record.ring)
    keep_kv = ring is not None and ring.communication.keep_kv
    place = (record.encode(), record.ring, record.backend)
    options = (scale, mask.causal, mask.window, mask.isolate, keep_kv)
    out, _, _ = ring_attention(query, key, value, sinks, *place, *options)
    return taken_apart(out, record.num_rows) if record.num_rows > 1 else out


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
    check_head_degree("head", record.head, query.shape[1], key.shape[1], replicate=True)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value need one dtype, got {query.dtype}, {key.dtype}, {value.dtype}.")
    if query.shape[2] != key.shape[2] or query.shape[2] != record.num_local_tokens:
        raise ValueError(
            f"this rank holds {record.num_local_tokens} of the sequence's {record.length} tokens, but got {shapes}. "
            "Attention takes the same tokens as queries and as keys: no cache, no cross-attention, nothing cut or "
            "joined along the sequence between collate and here."
        )
    if record.num_rows > 1 and query.shape[0] != record.num_rows:
        raise ValueError(
            f"the sequence record describes the documents of {record.num_rows} rows, but the batch has "
            f"{query.shape[0]} here: {shapes}. Pass whole batches to attention."
        )


def check_mask(mask: Mask, sinks: Tensor | None, query: Tensor, record: SequenceRecord) -> None:
    """Raise ``ValueError`` unless the mask and the sinks can be honoured."""
    if not mask.causal and record.padded:
        raise ValueError(
            "causal=False over rows that are padded: queries would see the padding. Give all rows a length that needs "
            "none (see the strategy's degrees and layout), or pack documents."
        )
    if sinks is not None and (sinks.shape != query.shape[1:2] or not sinks.is_floating_point()):
        raise ValueError(
            f"sinks of shape {tuple(sinks.shape)} and {sinks.dtype} must be one floating-point number for each of the "
            f"{query.shape[1]} query heads."
        )
