"""What the gloo tests run on every rank."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from lightning_longctx.attention import attend, close_ring, open_ring
from lightning_longctx.attention.transport import find_ring
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.testing.oracle import take_shard
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.neighbours import CONTEXT, axis_rank


def ring_attention(degrees, layout, tensors, scale=None, backend="auto", dtype=None):
    """Forward and backward of this rank's shard: ``(out, dq, dk, dv, sent bytes by link)``.

    ``tensors`` are query, key, value and the output's gradient over the whole sequence, the same on all ranks.
    """
    degrees = Degrees(**degrees).resolve(dist.get_world_size())
    rank = axis_rank(degrees, dist.get_rank(), *CONTEXT)
    ring = open_ring(degrees, dist.get_rank(), timedelta(seconds=60))
    length = tensors[0].shape[2]
    record = SequenceRecord(length, layout, degrees.context, degrees.inner, rank, ring=ring, backend=backend)
    query, key, value, grad = (take_shard(tensor, record.ranges, 2).contiguous() for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        out = attend(*leaves, sequence=record, scale=scale)
    grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    sent = dict(find_ring(ring).sent_bytes) if ring else {}
    close_ring(ring)
    return out.detach(), *grads, sent


def checkpointed(degrees, layout, tensors, attention):
    """Calls of attention's forward with non-reentrant checkpointing of plain SDPA inside an interception."""
    from torch.utils.checkpoint import checkpoint

    from lightning_longctx.attention import intercepted
    from lightning_longctx.attention.attend import calls_made

    degrees = Degrees(**degrees).resolve(dist.get_world_size())
    rank = axis_rank(degrees, dist.get_rank(), *CONTEXT)
    ring = open_ring(degrees, dist.get_rank(), timedelta(seconds=60))
    record = SequenceRecord(tensors[0].shape[2], layout, degrees.context, degrees.inner, rank, ring=ring)
    query, key, value, grad = (take_shard(tensor, record.ranges, 2).contiguous() for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    before = calls_made()
    with intercepted([record]):
        out = checkpoint(attention, *leaves, use_reentrant=False)
        out.backward(grad)
    grads = [leaf.grad for leaf in leaves]
    close_ring(ring)
    return out.detach(), *grads, calls_made() - before


def plain_attention(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def imported_attention(query, key, value):
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def opcheck_on_rank(length):
    """``torch.library.opcheck`` with real messages: every rank must call it."""
    degrees = Degrees(context=dist.get_world_size(), data=1)
    ring = open_ring(degrees, dist.get_rank(), timedelta(seconds=60))
    record = SequenceRecord(length, "zigzag", degrees.context, degrees.inner, dist.get_rank(), ring=ring)
    torch.manual_seed(dist.get_rank())
    tensors = [torch.randn(1, 2, record.num_local_tokens, 8, requires_grad=True) for _ in range(3)]
    result = torch.library.opcheck(
        torch.ops.longctx.ring_attention.default, (*tensors, record.encode(), ring, "auto", 0.3)
    )
    close_ring(ring)
    return result
