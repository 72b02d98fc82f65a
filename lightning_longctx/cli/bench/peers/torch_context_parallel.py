"""PyTorch's own context parallelism: the rings behind ``torch.distributed.tensor.experimental.context_parallel``.

Its dispatcher knows CUDA operations only; the rings take any operation, so they are called with the CPU one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx import _upstream
from lightning_longctx.cli.bench.attention_case import AttentionCase
from lightning_longctx.cli.bench.peers.peer import Attention, Peer, refuses
from lightning_longctx.sequence import LayoutName


def refusal(case: AttentionCase) -> str | None:
    """No windows or documents; even chunks."""
    return refuses(case, "causal", "full", even=2 * case.ranks)


def layout(case: AttentionCase) -> LayoutName:
    """Its load balancing is for causal masks."""
    return "zigzag" if case.visible.mask.causal else "contiguous"


def build(method: str, case: AttentionCase, rank: int) -> Attention:
    """A ring that rotates keys and values by ``method``, ``allgather`` or ``alltoall``."""
    causal = case.visible.mask.causal

    def attention(*qkv: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in qkv)
        return _Ring.apply(query, key, value, method, causal).transpose(1, 2)

    return attention


class _Ring(torch.autograd.Function):
    """Tensors [1, heads, tokens, width]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, method: str, causal: bool) -> Tensor:
        ctx.method, ctx.causal = method, causal
        ring = _upstream.context_parallel_ring(method, balanced=causal)
        found = ring.forward(
            dist.group.WORLD,
            2,
            _upstream.flash_attention_cpu,
            query=query,
            key=key,
            value=value,
            is_causal=causal,
            dropout_p=0.0,
        )
        ctx.save_for_backward(query, key, value, *found[:2])
        return found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        ring = _upstream.context_parallel_ring(ctx.method, balanced=ctx.causal)
        found = ring.backward(
            dist.group.WORLD,
            2,
            _upstream.flash_attention_cpu_backward,
            grad_out=grads[0],
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=lse,
            is_causal=ctx.causal,
            dropout_p=0.0,
        )
        return *found[:3], None, None


PEERS = tuple(
    Peer(f"torch_cp_{method}", "torch", "pip install torch", refusal, partial(build, method), layout, schedule)
    for method, schedule in (("allgather", "all_gather"), ("alltoall", "flat"))
)
