"""Ring attention as a pair of custom ops, forward and backward.

Being one op each, selective checkpointing can keep ``(out, lse)`` and never repeat the ring, and ``torch.compile`` sees
one node. Ops take no Python objects: the sequence record enters as an int64 tensor, the ring and the backend by name.
"""

import torch
from torch import Tensor

from lightning_longctx.attention import ring
from lightning_longctx.attention.backends import Needs, Scores, choose_backend
from lightning_longctx.attention.buffers import Buffers
from lightning_longctx.attention.dropout import CallDropout
from lightning_longctx.attention.merge import wide_dtype
from lightning_longctx.attention.rings import find_ring
from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.sequence.record import SequenceRecord

# No `from __future__ import annotations` here: the ops' schemas are read from the annotations.

_run = 0


@torch.library.custom_op("longctx::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    code: Tensor,
    ring_name: str,
    backend: str,
    scale: float,
    causal: bool,
    window: int | None,
    isolate: bool,
    softcap: float | None,
    dropout_p: float,
    draw: Tensor | None,
    keep_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of this rank's queries over all ranks' keys.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, D].
        sinks: [Hq] or None.
        code: ``SequenceRecord.encode()``, int64 on the CPU.
        ring_name: ``SequenceRecord.ring``.
        backend: ``SequenceRecord.backend``.
        scale: Factor on the scores.
        causal: As in ``plan.Mask``.
        window: As in ``plan.Mask``.
        isolate: As in ``plan.Mask``.
        softcap: As in ``Scores``.
        dropout_p: Probability that a weight is dropped.
        draw: As ``dropout.drawn`` gives it; None without dropout.
        keep_kv: ``Communication.keep_kv`` of the ring.

    Returns:
        out [B, Hq, T, D] in the inputs' dtype; lse [B, Hq, T] in float32 (float64 for float64 inputs); keys and values
        that were kept, as bytes.
    """
    global _run
    _run += 1
    options = (Mask(causal, window, isolate), Scores(scale, softcap), dropout_p, draw)
    engine = _engine(query, key, code, ring_name, backend, *options)
    with torch.autocast(query.device.type, enabled=False):  # autocast would still be on here, but off in backward
        out, lse, kept = ring.run(ring.forward(engine, query, key, value, sinks))
    return _as_promised(out), lse, kept


def rings_run() -> int:
    """Forward passes in this process so far: a step that shards sequences but runs no ring is a wrong one.

    Counted where compiled graphs pass too, and where the count is none of their inputs.
    """
    return _run


@torch.library.custom_op("longctx::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    code: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    ring_name: str,
    backend: str,
    scale: float,
    causal: bool,
    window: int | None,
    isolate: bool,
    softcap: float | None,
    dropout_p: float,
    draw: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``ring_attention`` by query, key, value and sinks (empty without), in the inputs' dtypes."""
    options = (Mask(causal, window, isolate), Scores(scale, softcap), dropout_p, draw)
    engine = _engine(query, key, code, ring_name, backend, *options)
    with torch.autocast(query.device.type, enabled=False):
        grads = ring.run(ring.backward(engine, grad, (query, key, value, out, lse, kept), sinks))
    dsinks = query.new_empty(0) if grads[3] is None else grads[3]
    return _as_promised(grads[0]), _as_promised(grads[1]), _as_promised(grads[2]), dsinks


def _engine(
    query: Tensor,
    key: Tensor,
    code: Tensor,
    ring_name: str,
    backend: str,
    mask: Mask,
    scores: Scores,
    dropout_p: float,
    draw: Tensor | None,
) -> ring.Engine:
    record, dropout = SequenceRecord.decode(code), None
    if draw is not None:
        length = record.length if record.num_rows > 1 else None
        dropout = CallDropout(dropout_p, *draw.tolist(), length=length)
    found = find_ring(ring_name)
    communication = found.communication if found else Communication()
    wire = getattr(torch, communication.dtype) if communication.dtype else None
    shape = AttentionShape(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        width=query.shape[3],
        item_size=(wire or key.dtype).itemsize,
        gradient_size=(wire or wide_dtype(key.dtype)).itemsize,
        batch=query.shape[0],
    )
    options = (mask.window is not None, scores.softcap is not None, dropout is not None)
    needs = Needs(query.device, query.dtype, query.shape[-1], *options)
    return ring.Engine(
        plan=plan_attention(record, mask, communication, shape),
        backend=choose_backend(backend, needs),
        scores=scores,
        dropout=dropout,
        transport=found.transport if found else None,
        buffers=found.buffers if found else Buffers(),
        wire=wire,
    )


@ring_attention.register_fake
def _(query, key, value, sinks, code, ring_name, backend, scale, causal, window, isolate, softcap, p, draw, keep_kv):
    lse = query.new_empty(query.shape[:3], dtype=wide_dtype(query.dtype))
    kept = key.new_empty(torch.library.get_ctx().new_dynamic_size() if keep_kv else 0, dtype=torch.uint8)
    return _token_major(query), lse, kept


@ring_attention_backward.register_fake
def _(
    grad,
    query,
    key,
    value,
    sinks,
    code,
    out,
    lse,
    kept,
    ring_name,
    backend,
    scale,
    causal,
    window,
    isolate,
    cap,
    p,
    draw,
):
    dsinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return _token_major(query), _token_major(key), _token_major(value), dsinks


def _as_promised(tensor: Tensor) -> Tensor:
    """Token-major in memory, as the fakes say: a result of a single tile has whatever strides the kernel gave it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _token_major(like: Tensor) -> Tensor:
    return like.new_empty(like.transpose(1, 2).shape).transpose(1, 2)


def _setup_context(ctx, inputs, output):
    query, key, value, sinks, code, *options, draw, _ = inputs
    out, lse, kept = output
    ctx.save_for_backward(query, key, value, sinks, code, out, lse, kept, draw)
    ctx.options = options
    ctx.mark_non_differentiable(lse, kept)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 15
    *saved, draw = ctx.saved_tensors  # once: checkpointing refuses to unpack a tensor twice
    grads = ring_attention_backward(grad, *saved, *ctx.options, draw)
    dsinks = None if saved[3] is None else grads[3]
    return *grads[:3], dsinks, *(None,) * 11


ring_attention.register_autograd(_backward, setup_context=_setup_context)
