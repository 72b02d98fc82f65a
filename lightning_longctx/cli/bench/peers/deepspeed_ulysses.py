"""DeepSpeed Ulysses (https://github.com/deepspeedai/DeepSpeed): tokens are exchanged for heads around attention."""

from __future__ import annotations

import os
from importlib import import_module
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_longctx.cli.bench.attention_case import AttentionCase, scaled_dot_product
from lightning_longctx.cli.bench.peers.peer import Attention, Peer, contiguous, refuses


def refusal(case: AttentionCase) -> str | None:
    """Heads must divide by the ranks."""
    if case.kv_heads % case.ranks:
        return f"needs key/value heads that divide by the {case.ranks} ranks, there are {case.kv_heads}"
    return refuses(case, "causal", "full", "documents", even=case.ranks)


def build(case: AttentionCase, rank: int) -> Attention:
    """``DistributedAttention`` around PyTorch's own operation."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Else a shared-memory reduction, which nothing here calls, would be compiled now, for minutes.
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = _nothing
    import_module("deepspeed.comm").init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    layer = import_module("deepspeed.sequence.layer")
    attention = layer.DistributedAttention(_Local(case), dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: attention(q, k, v, 0)


def _nothing() -> None:
    """In place of a compiled operation."""


class _Local(nn.Module):
    """Attention over the whole sequence for some heads."""

    def __init__(self, case: AttentionCase) -> None:
        super().__init__()
        self._pieces = [slice(start, stop) for start, stop in pairwise(case.documents or (0, case.tokens))]
        self._causal = case.visible.mask.causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        outs = [
            scaled_dot_product(q[:, :, p], k[:, :, p], v[:, :, p], is_causal=self._causal, enable_gqa=True)
            for p in self._pieces
        ]
        return torch.cat(outs, dim=2).transpose(1, 2) if len(outs) > 1 else outs[0].transpose(1, 2)


PEERS = (Peer("deepspeed_ulysses", "deepspeed", "pip install deepspeed", refusal, build, contiguous, "ulysses"),)
