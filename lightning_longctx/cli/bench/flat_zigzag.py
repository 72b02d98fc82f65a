"""The baseline: ring attention as the field has it, one flat zigzag ring that sends every block to every rank.

The schedule is that of ring-flash-attention's ``zigzag_ring_flash_attn_func`` (Zhu Zilin): keys and values rotate W - 1
hops in forward and again in backward, while float32 gradients of both rotate W hops, home. Every step posts its sends
and receives as one batch, computes the block at hand and waits. Blocks are computed by PyTorch's CPU flash attention.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx._upstream import flash_attention_cpu, flash_attention_cpu_backward


class Rotation:
    """Sends tensors to the next rank while it receives the previous rank's.

    Args:
        group: Of all ranks, in ring order.
        link: ``inner`` or ``outer``: the link to the next rank.
        sent_bytes: Counts what is sent, by link.
    """

    def __init__(self, group: dist.ProcessGroup, link: str, sent_bytes: Counter[str]) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._next = dist.get_global_rank(group, (rank + 1) % size)
        self._previous = dist.get_global_rank(group, (rank - 1) % size)
        self._group, self._link, self._sent_bytes = group, link, sent_bytes
        self._operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []
        self._arriving: tuple[Tensor, ...] = ()

    def post(self, *tensors: Tensor) -> None:
        """Begin to send [B, heads, tokens, width] tensors that lie token-major, and to receive as many."""
        sent = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        for ours, theirs in zip(sent, received, strict=True):
            self._operations.append(dist.P2POp(dist.isend, ours, self._next, self._group))
            self._operations.append(dist.P2POp(dist.irecv, theirs, self._previous, self._group))
        self._works = dist.batch_isend_irecv(self._operations)
        self._sent_bytes[self._link] += sum(tensor.nbytes for tensor in sent)
        self._arriving = tuple(tensor.transpose(1, 2) for tensor in received)

    def wait(self) -> tuple[Tensor, ...]:
        """What arrived."""
        for work in self._works:
            work.wait()
        self._operations, self._works = [], []  # which kept alive what was sent
        return self._arriving


@dataclass(frozen=True, eq=False)
class FlatRing:
    """One rank of the ring.

    Args:
        rank: Its position.
        size: Ranks.
        keys: Rotation of keys and values.
        gradients: Rotation of their gradients.
    """

    rank: int
    size: int
    keys: Rotation
    gradients: Rotation

    def seen(self, step: int, tokens: int) -> tuple[slice, slice]:
        """Which of this rank's queries see which keys of the block at hand; in step 0 causally, else all of them.

        Zigzag: a block from an earlier rank is seen in its first half, by all; from a later one by the second half.
        """
        whole, half = slice(None), tokens // 2
        if step == 0:
            return whole, whole
        return (whole, slice(0, half)) if step <= self.rank else (slice(half, None), whole)


class FlatZigzagAttention(torch.autograd.Function):
    """Causal attention of this rank's queries over all ranks' keys: ``apply(query, key, value, ring)``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: FlatRing) -> Tensor:
        """Tensors [1, heads, tokens, width], this rank's in zigzag order."""
        scale, wide = query.shape[-1] ** -0.5, torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros_like(query, dtype=wide)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=wide)
        block = (key, value)
        for step in range(ring.size):
            if step + 1 < ring.size:
                ring.keys.post(*block)
            rows, columns = ring.seen(step, query.shape[2])
            parts = (query[:, :, rows], block[0][:, :, columns], block[1][:, :, columns])
            _merge(out[:, :, rows], lse[:, :, rows], *flash_attention_cpu(*parts, 0.0, step == 0, scale=scale))
            if step + 1 < ring.size:
                block = ring.keys.wait()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """See ``torch.autograd.Function.backward``."""
        ring, saved = ctx.ring, Saved(*ctx.saved_tensors)
        block = (saved.key, saved.value)
        wide = torch.promote_types(saved.query.dtype, torch.float32)
        grad_query = torch.zeros_like(saved.query, dtype=wide)
        sums = tuple(torch.zeros_like(tensor, dtype=wide) for tensor in block)
        for step in range(ring.size):
            if step + 1 < ring.size:
                ring.keys.post(*block)
            rows, columns = ring.seen(step, saved.query.shape[2])
            dq, *dkv = saved.block_backward(grads[0], block, rows, columns, causal=step == 0)
            grad_query[:, :, rows] += dq
            if step > 0:
                sums = ring.gradients.wait()
            for total, part in zip(sums, dkv, strict=True):
                total[:, :, columns] += part
            if step + 1 < ring.size:
                block = ring.keys.wait()
            ring.gradients.post(*sums)
        own = ring.gradients.wait()
        return (*(grad.to(saved.query.dtype) for grad in (grad_query, *own)), None)


class Saved(NamedTuple):
    """What forward keeps for backward."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor

    def block_backward(
        self, grad: Tensor, block: tuple[Tensor, ...], rows: slice, columns: slice, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the queries at ``rows``, and of the keys and values at ``columns`` of a block."""
        query, out, lse = (tensor[:, :, rows] for tensor in (self.query, self.out, self.lse))
        key, value = (tensor[:, :, columns] for tensor in block)
        scale = query.shape[-1] ** -0.5
        inputs = (grad[:, :, rows], query, key, value, out, lse.contiguous())
        return flash_attention_cpu_backward(*inputs, 0.0, causal, scale=scale)


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block's softmax to ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp()[..., None]).add_(block_out * (block_lse - total).exp()[..., None])
    lse.copy_(total)
