"""USP of yunchang (https://github.com/feifeibear/long-context-attention): head exchange around a zigzag ring."""

from __future__ import annotations

from importlib import import_module

from lightning_longctx.cli.bench.attention_case import AttentionCase
from lightning_longctx.cli.bench.peers.flash_attn_stand_in import install
from lightning_longctx.cli.bench.peers.peer import Attention, Peer, ranks_per_node, refuses, zigzag
from lightning_longctx.cli.bench.peers.source_fix import with_own_sums
from lightning_longctx.topology.degrees import divisors


def head_degree(case: AttentionCase) -> int:
    """The most ranks that can exchange heads inside a node and leave a ring: one of 1 sends to itself, gloo cannot."""
    fitting = [
        degree
        for degree in divisors(case.ranks)
        if case.kv_heads % degree == 0 and 2 * degree <= case.ranks and ranks_per_node(case) % degree == 0
    ]
    return max(fitting, default=1)


def refusal(case: AttentionCase) -> str | None:
    """Causal only, in even chunks."""
    if case.ranks == 1:
        return "needs two ranks"
    return refuses(case, "causal", even=2 * case.ranks)


def build(case: AttentionCase, rank: int) -> Attention:
    """``LongContextAttention``, its ring over flash-attn."""
    install()
    yunchang, hybrid = import_module("yunchang"), import_module("yunchang.hybrid.utils")
    flash = import_module("yunchang.kernels").AttnType.FA
    degree = head_degree(case)
    yunchang.set_seq_parallel_pg(degree, case.ranks // degree, rank, case.ranks)
    ring = with_own_sums("yunchang.ring.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
    hybrid.RING_IMPL_DICT["zigzag"] = ring
    attention = yunchang.LongContextAttention(ring_impl_type="zigzag", attn_type=flash)
    return lambda q, k, v: attention(q, k, v, causal=True)


PEERS = (
    Peer(
        "yunchang_usp",
        "yunchang",
        "pip install --no-deps yunchang",
        refusal,
        build,
        zigzag,
        "ulysses x ring",
        head_degree,
    ),
)
