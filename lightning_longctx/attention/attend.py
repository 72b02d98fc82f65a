"""The one public entry: queries meet the keys of the whole sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longctx.attention.dropout import check_probability, drawn
from lightning_longctx.attention.exchange import trade_heads_for_tokens, trade_tokens_for_heads
from lightning_longctx.attention.heads import local_sinks
from lightning_longctx.attention.op import ring_attention
from lightning_longctx.attention.rings import find_ring
from lightning_longctx.attention.spans import in_a_row, taken_apart
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.topology.degrees import check_head_degree


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
    softcap: float | None = None,
    dropout_p: float = 0.0,
    num_heads: int | None = None,
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
            also where head ranks share the heads; of a DTensor, this rank's part.
        scale: Factor on the scores; None is ``D ** -0.5``.
        softcap: Scores become ``softcap * tanh(score / softcap)`` before the mask (Gemma 2, arXiv 2408.00118).
        dropout_p: Probability that a weight is dropped (the others grow by ``1 / (1 - p)``); pass 0 in evaluation. In a
            training step of the strategy the same weights are dropped for every layout and every degree, and when
            attention is recomputed.
        num_heads: Query heads of the whole layer, where tensor ranks hold Hq of them each: dropout goes by a head's
            number among all. None: Hq are all.

    Returns:
        [B, Hq, T, D] in the inputs' dtype (autocast's, where that is on).

    Raises:
        ValueError: Shapes, dtypes or options do not fit each other or the record, before anything is sent.
    """
    options = AttentionOptions(Mask(causal, window), scale, softcap, dropout_p, num_heads)
    sinks = sinks.to_local() if isinstance(sinks, DTensor) else sinks
    return attend_masked(query, key, value, options, sequence=sequence, sinks=sinks)


@dataclass(frozen=True)
class AttentionOptions:
    """What of an attention call is no tensor; see ``attend``."""

    mask: Mask = CAUSAL
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    num_heads: int | None = None

    def __post_init__(self) -> None:
        check_probability(self.dropout_p)
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap} must be positive and finite, or None for no cap.")


def attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    sequence: SequenceRecord | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``attend`` under any mask; arguments as there."""
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):  # not on the meta device
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    record = sequence or SequenceRecord(length=query.shape[2])
    check_inputs(query, key, value, record)
    check_mask(options.mask, sinks, query, record)
    draw = None
    if options.dropout_p > 0:
        first_head = first_of_heads(query.shape[1], options.num_heads, record)
        draw = drawn(record.num_ranks * record.head * record.tensor, first_head)
    # Kernels are called below the check by which PyTorch's own attention makes the last dim dense.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if record.head == 1:
        return _over_context(query, key, value, options, record, sinks, draw)
    query, key, value = trade_tokens_for_heads(query, key, value, record.ring, record.head)
    if sinks is not None:
        sinks = local_sinks(sinks, record.head, record.head_rank)
    out = _over_context(query, key, value, options, record, sinks, draw)
    return trade_heads_for_tokens(out, record.ring, record.head)


def _over_context(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    record: SequenceRecord,
    sinks: Tensor | None,
    draw: Tensor | None,
) -> Tensor:
    if record.num_rows > 1:
        query, key, value = (in_a_row(tensor) for tensor in (query, key, value))
    ring, mask = find_ring(record.ring), options.mask
    keep_kv = ring is not None and ring.communication.keep_kv
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    place = (record.encode(), record.ring, record.backend)
    numbers = (scale, mask.causal, mask.window, mask.isolate, options.softcap, options.dropout_p, draw, keep_kv)
    out, _, _ = ring_attention(query, key, value, sinks, *place, *numbers)
    return taken_apart(out, record.num_rows) if record.num_rows > 1 else out


def first_of_heads(num_local_heads: int, num_heads: int | None, record: SequenceRecord) -> int:
    """Global number of the first query head that this rank computes.

    Args:
        num_local_heads: Query heads of the call, before head ranks share them.
        num_heads: Of the whole layer; None: the call has all.
        record: Says which head rank and which tensor rank this is.

    Raises:
        ValueError: The tensor ranks do not hold equal parts of the heads.
    """
    first = record.head_rank * (num_local_heads // record.head)
    if num_heads in (None, num_local_heads):
        return first
    if num_local_heads * record.tensor != num_heads:
        raise ValueError(
            f"num_heads={num_heads}, but attention got {num_local_heads} query heads on each of {record.tensor} tensor "
            f"ranks. Pass num_heads={num_local_heads * record.tensor}, or None where no tensor ranks share the heads."
        )
    return first + record.tensor_rank * num_local_heads


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
