"""What the gloo tests run on every rank."""

import os
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lightning_longctx.attention import attend, close_ring, intercepted, open_ring
from lightning_longctx.attention.op import rings_run
from lightning_longctx.attention.rings import find_ring
from lightning_longctx.models.config import DecoderConfig
from lightning_longctx.models.decoder import Decoder
from lightning_longctx.plan.communication import Communication
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.testing.oracle import take_shard
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.neighbours import CONTEXT, axis_rank

AUTO = Communication()


@contextmanager
def opened(degrees, communication=AUTO, *, length, layout="zigzag", nodes=1, **kwargs):
    """An open ring's record for this rank; ``kwargs`` are fields of it."""
    degrees = Degrees(**degrees).resolve(dist.get_world_size())
    rank = dist.get_rank()
    with on_node(rank * nodes // dist.get_world_size()):
        ring = open_ring(degrees, rank, timedelta(seconds=60), communication)
    place = axis_rank(degrees, rank, *CONTEXT), degrees.head, axis_rank(degrees, rank, "head")
    try:
        yield SequenceRecord(length, layout, degrees.context, degrees.inner, *place, ring=ring, **kwargs)
    finally:
        close_ring(ring)


@contextmanager
def on_node(node):
    """As torchrun tells its processes."""
    before = os.environ.get("GROUP_RANK")
    os.environ["GROUP_RANK"] = str(node)
    try:
        yield
    finally:
        del os.environ["GROUP_RANK"]
        os.environ.update({} if before is None else {"GROUP_RANK": before})


def cut(tensor, record):
    """This rank's tokens of every row."""
    rows = record.row_ranges
    if len(rows) == 1:
        return take_shard(tensor, rows[0], 2).contiguous()
    return torch.cat([take_shard(tensor[i : i + 1], ranges, 2) for i, ranges in enumerate(rows)])


def ring_attention(
    degrees, layout, tensors, *, sinks=None, mask=(True, None), communication=AUTO, dtype=None, **fields
):
    """Forward and backward of this rank's shard.

    Args:
        degrees: Fields of ``Degrees``.
        layout: How the sequence is cut.
        tensors: Query, key, value and the output's gradient over the whole sequence, the same on all ranks.
        sinks: One logit per head.
        mask: ``(causal, window)``.
        communication: How keys and values travel.
        dtype: Of autocast; None is off.
        fields: More of the record, and the ``nodes`` that ranks are spread over.

    Returns:
        ``(record, (out, dq, dk, dv[, dsinks]), bytes sent by link)``; ``dsinks`` is this rank's part of a sum.
    """
    with opened(degrees, communication, length=tensors[0].shape[2], layout=layout, **fields) as record:
        query, key, value, grad = (cut(tensor, record) for tensor in tensors)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        if sinks is not None:
            sinks = sinks.clone().requires_grad_()
            leaves.append(sinks)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = attend(*leaves[:3], sequence=record, causal=mask[0], window=mask[1], sinks=sinks)
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
        sent = dict(find_ring(record.ring).sent_bytes) if record.ring else {}
    return record, (out.detach(), *grads), sent


def checkpointed(degrees, layout, tensors, attention):
    """Calls of attention's forward with non-reentrant checkpointing of plain SDPA inside an interception."""
    with opened(degrees, length=tensors[0].shape[2], layout=layout) as record:
        query, key, value, grad = (cut(tensor, record) for tensor in tensors)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        before = rings_run()
        with intercepted([record]):
            out = checkpoint(attention, *leaves, use_reentrant=False)
            out.backward(grad)
    return record, (out.detach(), *(leaf.grad for leaf in leaves)), rings_run() - before


def plain_attention(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def imported_attention(query, key, value):
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


RING_FORWARD = torch.ops.longctx.ring_attention.default


def keep_attention(ctx, op, *args, **kwargs):
    """A policy as selective checkpointing wants it."""
    return CheckpointPolicy.MUST_SAVE if op is RING_FORWARD else CheckpointPolicy.PREFER_RECOMPUTE


def selective():
    return create_selective_checkpoint_contexts(keep_attention)


def checkpointed_with_kept_keys(degrees, layout, tensors, sinks, how):
    """Like ``ring_attention`` with ``keep_kv``, under ``how``: ``none``, ``whole`` or ``selective`` checkpointing."""
    communication = Communication("double_ring", keep_kv=True)
    with opened(degrees, communication, length=tensors[0].shape[2], layout=layout) as record:
        query, key, value, grad = (cut(tensor, record) for tensor in tensors)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        leaves.append(sinks.clone().requires_grad_())

        def block(q, k, v, s):
            return attend(q * 1.5, k, v, sequence=record, sinks=s) * 2

        if how == "none":
            out = block(*leaves)
        elif how == "whole":
            out = checkpoint(block, *leaves, use_reentrant=False)
        else:
            out = checkpoint(block, *leaves, use_reentrant=False, context_fn=selective)
        grads = torch.autograd.grad(out, leaves, grad)
        sent = dict(find_ring(record.ring).sent_bytes)
    return record, (out.detach(), *grads), sent


def compiled(degrees, layout, tensors, sinks, keep_kv):
    """Like ``ring_attention``, compiled as far as AOTAutograd's graphs."""
    communication = Communication("double_ring", keep_kv)
    torch.compiler.reset()
    with opened(degrees, communication, length=tensors[0].shape[2], layout=layout) as record:
        query, key, value, grad = (cut(tensor, record) for tensor in tensors)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        leaves.append(sinks.clone().requires_grad_())

        def block(q, k, v, s):
            return attend(q * 1.5, k, v, sequence=record, sinks=s) * 2

        out = torch.compile(block, backend="aot_eager")(*leaves)
        grads = torch.autograd.grad(out, leaves, grad)
        sent = dict(find_ring(record.ring).sent_bytes)
    return record, (out.detach(), *grads), sent


def opcheck_on_rank(length, degrees, keep_kv):
    """``torch.library.opcheck`` with real messages, sinks, documents and a window: every rank must call it."""
    communication = Communication("double_ring", keep_kv)
    with opened(degrees, communication, length=length, documents=(0, 3, length)) as record:
        torch.manual_seed(dist.get_rank())
        tensors = [torch.randn(1, 2, record.num_local_tokens, 8, requires_grad=True) for _ in range(3)]
        torch.manual_seed(0)
        tensors.append(torch.randn(2, requires_grad=True))
        place = (record.encode(), record.ring, record.backend)
        return torch.library.opcheck(RING_FORWARD, (*tensors, *place, 0.3, True, 9, True, None, 0.0, None, keep_kv))


def counted_flops(degrees, tensors):
    """What ``FlopCounterMode`` counts on this rank, by operation."""
    with opened(degrees, length=tensors[0].shape[2]) as record:
        query, key, value, grad = (cut(tensor, record) for tensor in tensors)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(attend(*leaves, sequence=record), leaves, grad)
    return {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}


def compiled_decoder(degrees, length):
    """Logits and gradients of our decoder on this rank's tokens, eager and compiled as far as AOTAutograd's graphs."""
    torch.compiler.reset()
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "width": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = Decoder(DecoderConfig(**shape, windows=(None, 5), sinks=True, qk_norm=True)).double()
    results = []
    with opened(degrees, length=length, documents=(0, 3, length)) as record:
        positions = torch.tensor([[*range(3), *range(length - 3)]])
        tokens = torch.randint(32, (1, length), generator=torch.Generator().manual_seed(1))
        held = [position for piece in record.ranges for position in piece]
        record.prepare()
        for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            logits = call(tokens[:, held], positions[:, held], record)
            results.append((logits.detach(), *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    return results
