from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from lightning_longctx.cli.bench.attention_case import AttentionCase, scaled_dot_product
from lightning_longctx.cli.bench.peers import PEERS, Peer, admitted_peers
from lightning_longctx.cli.bench.peers import flash_attn_stand_in as flash
from lightning_longctx.cli.bench.peers.peer import contiguous, ranks_per_node
from lightning_longctx.cli.bench.peers.traffic import bytes_by_peer, count_sent
from lightning_longctx.cli.bench.peers.yunchang_usp import head_degree

BY_NAME = {peer.name: peer for peer in PEERS}


def case_of(mask: str = "causal", **sizes: object) -> AttentionCase:
    options = {"ranks": 2, "tokens": 256, "heads": 4, "kv_heads": 4, "width": 8, "dtype": "float32"}
    return AttentionCase(**options | sizes, mask=mask)  # type: ignore[arg-type]


def able(case: AttentionCase) -> str | None:
    return None


def unable(case: AttentionCase) -> str | None:
    return "does not like it"


def right(case: AttentionCase, rank: int) -> Callable[..., Tensor]:
    def attention(*qkv: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in qkv)
        return scaled_dot_product(q, k, v, is_causal=True).transpose(1, 2)

    return attention


def wrong(case: AttentionCase, rank: int) -> Callable[..., Tensor]:
    return lambda q, k, v: right(case, rank)(q, k, 2 * v)


def failing(case: AttentionCase, rank: int) -> Callable[..., Tensor]:
    raise ArithmeticError("cannot count")


def test_a_peer_that_is_absent_unable_wrong_or_broken_is_named_and_the_others_go_on() -> None:
    def peer(name: str, build: object, refusal: object = able, package: str = "torch") -> Peer:
        return Peer(name, package, "pip install it", refusal, build, contiguous, "none")  # type: ignore[arg-type]

    peers = (
        peer("absent", right, package="no_such_package_anywhere"),
        peer("unable", right, unable),
        peer("wrong", wrong),
        peer("broken", failing),
        peer("right", right),
    )
    admitted, reasons = admitted_peers(case_of(ranks=1, tokens=64), peers)
    assert [each.name for each in admitted] == ["right"]
    assert reasons.keys() == {"absent", "unable", "wrong", "broken"}
    assert reasons["absent"] == "not installed: pip install it"
    assert reasons["unable"] == "does not like it"
    assert reasons["wrong"].startswith("wrong: wrong does not compute what it should (out on rank 0 is off by 1;")
    assert reasons["broken"] == "fails: ArithmeticError: cannot count"


@pytest.mark.parametrize("mask", ["causal", "full", "documents:64"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_installed_peers_compute_the_formula(name: str, mask: str) -> None:
    peer, case = BY_NAME[name], case_of(mask)
    if find_spec(peer.package) is None:
        pytest.skip(f"{peer.package} is not installed")
    if reason := peer.refusal(case):
        pytest.skip(f"{name} {reason}")
    admitted, reasons = admitted_peers(case, (peer,))
    assert (admitted, reasons) == ((peer,), {})


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("ring_flash_attn_zigzag", case_of("documents:64", ranks=8), "documents whose lengths all divide by 16"),
        ("ring_flash_attn_zigzag", case_of(tokens=258), "tokens that divide by 4"),
        ("ring_flash_attn_zigzag", case_of("full"), "does not compute mask=full"),
        ("ring_flash_attn_llama3", case_of("window:64"), "does not compute mask=window:64"),
        ("deepspeed_ulysses", case_of(ranks=4, kv_heads=2), "key/value heads that divide by the 4 ranks, there are 2"),
        ("yunchang_usp", case_of("documents:64"), "does not compute mask=documents:64"),
        ("yunchang_usp", case_of(ranks=1), "needs two ranks"),
        ("torch_cp_allgather", case_of("documents:64"), "does not compute"),
    ],
)
def test_what_a_peer_cannot_is_known_before_it_is_tried(name: str, case: AttentionCase, reason: str) -> None:
    assert reason in str(BY_NAME[name].refusal(case))


def test_every_peer_can_do_plain_causal_attention() -> None:
    assert [peer.refusal(case_of()) for peer in PEERS] == [None] * len(PEERS)


def test_usp_exchanges_heads_inside_a_node_and_leaves_a_ring() -> None:
    assert [head_degree(case_of(ranks=ranks, heads=8, kv_heads=8)) for ranks in (2, 4, 8)] == [1, 2, 4]
    assert head_degree(case_of(ranks=8, heads=8, kv_heads=2)) == 2
    assert head_degree(case_of(ranks=8, heads=8, kv_heads=8, inner_ring=2)) == 2
    assert ranks_per_node(case_of(ranks=8, inner_ring=2)) == 2
    assert ranks_per_node(case_of(ranks=8)) == 8


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(16, 16, True), (16, 16, False), (6, 16, True), (6, 16, False)]
)
def test_the_stand_in_computes_attention(queries: int, keys: int, causal: bool) -> None:
    q, k, v, grad = (
        torch.randn(2, tokens, heads, 8) for tokens, heads in ((queries, 4), (keys, 2), (keys, 2), (queries, 4))
    )
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else None
    heads_first = [tensor.transpose(1, 2) for tensor in leaves]
    expected = scaled_dot_product(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    scores = heads_first[0] @ heads_first[1].repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
    expected_lse = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).logsumexp(-1)

    out, lse, *_ = flash.forward(q, k, v, 0.0, None, causal)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    found = [torch.full_like(tensor, torch.nan) for tensor in (q, k, v)]
    flash.backward(grad, q, k, v, out, lse, *found, 0.0, None, causal)
    for actual, wanted in zip(found, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_stand_in_keeps_documents_apart() -> None:
    q, k, v, grad = (torch.randn(24, 4, 8) for _ in range(4))
    lengths = torch.tensor([0, 8, 9, 24], dtype=torch.int32)
    out, lse, *_ = flash.varlen_forward(q, k, v, lengths, lengths, 15, 15, 0.0, None, True)
    found = [torch.full_like(tensor, torch.nan) for tensor in (q, k, v)]
    flash.varlen_backward(grad, q, k, v, out, lse, *found, lengths, lengths, 15, 15, 0.0, None, True)
    for start, stop in ((0, 8), (8, 9), (9, 24)):
        one, one_lse, *_ = flash.forward(q[None, start:stop], k[None, start:stop], v[None, start:stop], 0.0, None, True)
        torch.testing.assert_close(out[None, start:stop], one)
        torch.testing.assert_close(lse[None, :, start:stop], one_lse)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    pieces = [[leaf[None, start:stop] for leaf in leaves] for start, stop in ((0, 8), (8, 9), (9, 24))]
    whole = torch.cat([flash.flash_attn_func(*piece, causal=True)[0] for piece in pieces])
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    for actual, wanted in zip(found, torch.autograd.grad(whole, leaves, grad), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_the_stand_in_refuses_what_it_would_ignore() -> None:
    q = torch.randn(1, 4, 2, 8)
    for options in ({"window_size_left": 3}, {"softcap": 1.0}, {"alibi_slopes": torch.ones(2)}):
        with pytest.raises(ValueError, match="knows no dropout, window"):
            flash.forward(q, q, q, 0.0, None, True, **options)
    with pytest.raises(ValueError, match="knows no dropout"):
        flash.forward(q, q, q, 0.1, None, True)


def test_bytes_are_counted_as_gloo_sends_them() -> None:
    part = torch.zeros(8, 4)  # 128 bytes
    assert bytes_by_peer("send", [[part, part], 3], 4, 1) == {3: 256}
    assert bytes_by_peer("recv_", [[part]], 4, 1) == {}
    assert bytes_by_peer("_allgather_base_", [part], 4, 3) == {0: 3 * 128}
    assert bytes_by_peer("allgather_", [[part]], 4, 0) == {1: 3 * 128}
    assert bytes_by_peer("_reduce_scatter_base_", [part], 4, 0) == {1: 2 * 3 * 32}
    assert bytes_by_peer("alltoall_base_", [part, []], 4, 0) == {1: 32, 2: 32, 3: 32}
    assert bytes_by_peer("all_to_all_single", [part, [0, 8, 0, 0]], 4, 0) == {1: 128, 2: 0, 3: 0}
    assert bytes_by_peer("alltoall_", [[part, part[:2]]], 2, 0) == {1: 32}
    with pytest.raises(ValueError, match="broadcast_ cannot be counted"):
        bytes_by_peer("broadcast_", [part], 2, 0)


def test_computing_alone_sends_nothing() -> None:
    assert not count_sent(lambda: torch.ones(3).sum(), rank=0, ranks_per_node=1)


def test_a_peer_says_what_its_columns_mean() -> None:
    case = case_of("documents:64")
    assert BY_NAME["ring_flash_attn_zigzag"].describe(case) == {"layout": "document_zigzag", "schedule": "flat"}
    assert BY_NAME["ring_flash_attn_zigzag"].describe(case_of())["layout"] == "zigzag"
    assert BY_NAME["torch_cp_alltoall"].describe(replace(case, mask="full"))["layout"] == "contiguous"
    assert {peer.num_ranks(case) for peer in PEERS} == {2}
