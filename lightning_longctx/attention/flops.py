"""Floating-point operations of attention over ranks, for ``FlopCounterMode`` and Lightning's ``measure_flops``.

The convention is PyTorch's: two matrix products forward and five backward, of which one computes the scores again. But
only pairs that a query sees are counted, where PyTorch counts a causal mask as if there were none. Exchanges of heads
(``longctx::split_heads``, ``longctx::join_heads``) have no formula: they compute nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_longctx import _upstream
from lightning_longctx.attention import op  # noqa: F401  defines the ops
from lightning_longctx.attention.rings import find_ring
from lightning_longctx.plan.choose import visible_pairs_on_rank
from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.shape import BACKWARD_FLOPS, FORWARD_FLOPS
from lightning_longctx.sequence.record import SequenceRecord


def attention_flops(query: Tensor, key: Tensor, code: Tensor, ring_name: str, mask: Mask) -> int:
    """Per rank, for one operation a visible pair, head and unit of width.

    Args:
        query: [B, Hq, T, D] as the op takes it; only its shape counts, so that it may be on the meta device.
        key: [B, Hkv, T, D], likewise.
        code: ``SequenceRecord.encode()``. A fake tensor, as the compiler traces with, cannot be read; then all keys of
            all ranks are counted for every query: an upper bound.
        ring_name: As in the op.
        mask: As in the op.
    """
    batch, heads, queries, width = query.shape
    if _upstream.is_fake(code) or code.is_meta:
        found = find_ring(ring_name)
        num_ranks = found.transport.num_ranks if found and found.transport else 1
        return batch * heads * width * queries * key.shape[2] * num_ranks
    return batch * heads * width * visible_pairs_on_rank(SequenceRecord.decode(code), mask)


# The formulas get the ops' own arguments; the rest of them does not matter.


@register_flop_formula(torch.ops.longctx.ring_attention, get_raw=True)
def _forward(query, key, value, sinks, code, ring_name, backend, scale, causal, window, isolate, *_, **__) -> int:
    return FORWARD_FLOPS * attention_flops(query, key, code, ring_name, Mask(causal, window, isolate))


@register_flop_formula(torch.ops.longctx.ring_attention_backward, get_raw=True)
def _backward(grad, query, key, value, sinks, code, out, lse, kept, ring_name, *options, **_) -> int:
    _, _, causal, window, isolate, *_ = options
    return BACKWARD_FLOPS * attention_flops(query, key, code, ring_name, Mask(causal, window, isolate))
