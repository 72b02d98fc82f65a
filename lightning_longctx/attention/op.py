"""Ring attention as a pair of custom ops, forward and backward.

Being one op each, selective checkpointing can keep ``(out, lse)`` and never repeat the ring, and ``torch.compile`` sees
one node. Ops take no Python objects: the sequence record enters as an int64 tensor, the ring and the backend by name.
"""

import torch
from torch import Tensor

from lightning_longctx.attention import ring
from lightning_longctx.attention.backends import Backend, choose_backend
from lightning_longctx.attention.merge import wide_dtype
from lightning_longctx.attention.transport import Transport, find_ring
from lightning_longctx.plan.choose import AttentionPlan, plan_attention
from lightning_longctx.sequence.record import SequenceRecord

# No `from __future__ import annotations` here: the ops' schemas are read from the annotations.


@torch.library.custom_op("longctx::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, code: Tensor, ring_name: str, backend: str, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries over all ranks' keys.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, D].
        code: ``SequenceRecord.encode()``, int64 on the CPU.
        ring_name: ``SequenceRecord.ring``.
        backend: ``SequenceRecord.backend``.
        scale: Factor on the scores.

    Returns:
        out [B, Hq, T, D] in the inputs' dtype; lse [B, Hq, T] in float32 (float64 for float64 inputs).
    """
    plan, transport, engine = _resolve(query, code, ring_name, backend)
    with torch.autocast(query.device.type, enabled=False):  # autocast would still be on here, but off in backward
        return ring.run(ring.forward(plan, transport, engine, query, key, value, scale))


@torch.library.custom_op("longctx::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    code: Tensor,
    ring_name: str,
    backend: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``ring_attention`` by query, key and value, contiguous, in the inputs' dtype."""
    plan, transport, engine = _resolve(query, code, ring_name, backend)
    with torch.autocast(query.device.type, enabled=False):
        return ring.run(ring.backward(plan, transport, engine, (query, key, value, out, lse), grad, scale))


def _resolve(
    query: Tensor, code: Tensor, ring_name: str, backend: str
) -> tuple[AttentionPlan, Transport | None, Backend]:
    record = SequenceRecord.decode(code)
    plan = plan_attention(record.length, record.layout, record.num_ranks, record.inner_ring, record.rank)
    return plan, find_ring(ring_name), choose_backend(backend, query.device, query.dtype, query.shape[-1])


@ring_attention.register_fake
def _(query, key, value, code, ring_name, backend, scale):
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=wide_dtype(query.dtype))


@ring_attention_backward.register_fake
def _(grad, query, key, value, out, lse, code, ring_name, backend, scale):
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx, inputs, output):
    query, key, value, code, *options = inputs
    out, lse = output
    ctx.save_for_backward(query, key, value, out, lse, code)
    ctx.options = options
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    if grad is None:
        return (None,) * 7
    grads = ring_attention_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *grads, None, None, None, None


ring_attention.register_autograd(_backward, setup_context=_setup_context)
