"""ring-flash-attn (https://github.com/zhuzilin/ring-flash-attention): zigzag rings and Llama 3's gathered keys."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from lightning_longctx.cli.bench.attention_case import AttentionCase
from lightning_longctx.cli.bench.peers.flash_attn_stand_in import install
from lightning_longctx.cli.bench.peers.peer import Attention, Peer, contiguous, refuses
from lightning_longctx.cli.bench.peers.source_fix import with_own_sums
from lightning_longctx.sequence import LayoutName

_INSTALL = "pip install --no-deps ring-flash-attn"


def zigzag_refusal(case: AttentionCase) -> str | None:
    """Causal, also within documents; every one must divide into twice as many chunks as there are ranks."""
    chunks = 2 * case.ranks
    if any((stop - start) % chunks for start, stop in pairwise(case.documents)):
        return f"needs documents whose lengths all divide by {chunks}"
    return refuses(case, "causal", "documents", even=chunks)


def zigzag_ring(case: AttentionCase, rank: int) -> Attention:
    """The ring, or its form for packed documents."""
    if not case.documents:
        ring = _module("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
        return lambda q, k, v: ring(q, k, v, causal=True)
    ring = _module("zigzag_ring_flash_attn_varlen").zigzag_ring_flash_attn_varlen_func
    local = torch.tensor([offset // case.ranks for offset in case.documents], dtype=torch.int32)
    longest = int(local.diff().max())
    return lambda q, k, v: ring(q[0], k[0], v[0], local, longest, causal=True)[None]


def zigzag_layout(case: AttentionCase) -> LayoutName:
    """Zigzag within every document."""
    return "document_zigzag" if case.documents else "zigzag"


def llama3_refusal(case: AttentionCase) -> str | None:
    """Anything but windows, in even shards."""
    return refuses(case, "causal", "full", "documents", even=case.ranks)


def llama3(case: AttentionCase, rank: int) -> Attention:
    """Keys and values of one head after another are gathered on every rank."""
    module, causal = _module("llama3_flash_attn_varlen"), case.visible.mask.causal
    documents = torch.tensor(case.documents or (0, case.tokens), dtype=torch.int32)
    prepare = module.llama3_flash_attn_prepare_cu_seqlens
    queries, keys, longest_query, longest_key, held = prepare(documents, causal, rank, case.ranks)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = (queries, keys, longest_query, longest_key)
        found = module.llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], *lengths, heads_k_stride=1, local_k_slice=held, causal=causal
        )
        return found[None]

    return attention


PEERS = (
    Peer("ring_flash_attn_zigzag", "ring_flash_attn", _INSTALL, zigzag_refusal, zigzag_ring, zigzag_layout, "flat"),
    Peer("ring_flash_attn_llama3", "ring_flash_attn", _INSTALL, llama3_refusal, llama3, contiguous, "all_gather"),
)


def _module(name: str) -> ModuleType:
    install()
    # The package imports its adapters for transformers, which transformers 5 breaks; nothing here needs them.
    adapters = ModuleType("ring_flash_attn.adapters")
    vars(adapters).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault(adapters.__name__, adapters)
    return with_own_sums(f"ring_flash_attn.{name}")
