"""Tokens for heads and back: who gets what, in which order, and what comes home in backward."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.attention.buffers import Buffers
from lightning_longctx.attention.exchange import join_heads, split_heads, trade_heads_for_tokens, trade_tokens_for_heads
from lightning_longctx.attention.heads import (
    local_heads,
    local_sinks,
    pack_heads,
    pack_tokens,
    unpack_heads,
    unpack_tokens,
)
from lightning_longctx.attention.rings import close_ring, find_ring, open_ring
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees

HEADS = [(2, 8, 8), (2, 8, 2), (4, 8, 2), (4, 4, 1), (6, 6, 2), (1, 4, 2)]
"""(head ranks, query heads, key/value heads), with and without copies."""


def exchanged(sent: list[Tensor]) -> list[Tensor]:
    """What an all-to-all does."""
    return [torch.stack([rows[rank] for rows in sent]) for rank in range(len(sent))]


def split(by_rank: list[list[Tensor]]) -> list[list[Tensor]]:
    buffers, degree = Buffers(), len(by_rank)
    received = exchanged([pack_heads(tensors, degree, buffers) for tensors in by_rank])
    return [unpack_tokens(rows, [x.shape for x in tensors]) for rows, tensors in zip(received, by_rank, strict=True)]


def joined(by_rank: list[list[Tensor]], shapes: list[torch.Size]) -> list[list[Tensor]]:
    buffers, degree = Buffers(), len(by_rank)
    return [unpack_heads(rows, shapes) for rows in exchanged([pack_tokens(x, degree, buffers) for x in by_rank])]


def whole(num_heads: int, degree: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Different numbers in [2, num_heads, 3 * degree, 4], in strides that no reshape likes."""
    size = 2 * num_heads * 3 * degree * 4
    numbers = torch.randperm(size, generator=torch.Generator().manual_seed(num_heads)).to(dtype)
    return numbers.view(2, 3 * degree, 4, num_heads).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("degree", "num_heads", "num_kv_heads"), HEADS)
def test_every_rank_gets_its_heads_of_all_tokens(degree: int, num_heads: int, num_kv_heads: int) -> None:
    query, key, value = whole(num_heads, degree), whole(num_kv_heads, degree), -whole(num_kv_heads, degree)
    parts = zip(*(x.chunk(degree, 2) for x in (query, key, value)), strict=True)
    for rank, (q, k, v) in enumerate(split([list(part) for part in parts])):
        heads, kv_heads = local_heads(num_heads, num_kv_heads, degree, rank)
        assert torch.equal(q, query[:, heads.start : heads.stop])
        assert torch.equal(k, key[:, kv_heads.start : kv_heads.stop])
        assert torch.equal(v, value[:, kv_heads.start : kv_heads.stop])
        assert all(tensor.transpose(1, 2).is_contiguous() for tensor in (q, k, v))
        group = num_heads // num_kv_heads  # each local query head finds its own key head
        assert [head // group for head in heads] == [
            kv_heads[i * len(kv_heads) // len(heads)] for i in range(len(heads))
        ]


@pytest.mark.parametrize(("degree", "num_heads", "num_kv_heads"), HEADS)
def test_the_way_back_is_the_transposed_map(degree: int, num_heads: int, num_kv_heads: int) -> None:
    """``<split(x), y> == <x, join(y)>``: what a gradient is; copies of a head are summed."""
    for total in (num_heads, num_kv_heads):
        parts = [[part] for part in whole(total, degree).chunk(degree, 2)]
        out = [x for (x,) in split(parts)]
        grads = [
            torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(out)
        ]
        back = [x for (x,) in joined([[grad] for grad in grads], [parts[0][0].shape])]
        assert all(x.transpose(1, 2).is_contiguous() for x in back)
        forth = sum((x * grad).sum() for x, grad in zip(out, grads, strict=True))
        torch.testing.assert_close(forth, sum((x * part).sum() for x, (part,) in zip(back, parts, strict=True)))


def test_outputs_come_back_as_they_went() -> None:
    query = whole(8, 4)
    parts = [[part] for part in query.chunk(4, 2)]
    back = joined(split(parts), [parts[0][0].shape])
    assert torch.equal(torch.cat([x for (x,) in back], 2), query)


def test_copies_are_summed_wide() -> None:
    """1 and seven times 1/256: each is half a unit of bfloat16, and lost if added to 1 in bfloat16."""
    grads = [[torch.full((1, 1, 8, 2), 1.0 if rank == 0 else 2.0**-8, dtype=torch.bfloat16)] for rank in range(8)]
    for (back,) in joined(grads, [torch.Size([1, 1, 1, 2])]):
        assert back.dtype == torch.bfloat16
        assert torch.equal(back, torch.full((1, 1, 1, 2), 1 + 7 / 256).bfloat16())


def test_heads_of_a_rank() -> None:
    assert [local_heads(8, 2, 4, rank) for rank in range(4)] == [
        (range(0, 2), range(0, 1)),
        (range(2, 4), range(0, 1)),
        (range(4, 6), range(1, 2)),
        (range(6, 8), range(1, 2)),
    ]
    assert local_heads(12, 6, 3, 2) == (range(8, 12), range(4, 6))
    with pytest.raises(ValueError, match="head=4 does not fit 6 query heads"):
        local_heads(6, 6, 4, 0)


def test_sinks_of_a_rank() -> None:
    sinks = torch.arange(8.0, requires_grad=True)
    assert local_sinks(sinks, 4, 2).tolist() == [4.0, 5.0]
    local_sinks(sinks, 4, 2).sum().backward()
    assert sinks.grad is not None and sinks.grad.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]


def ops_on_rank(dtype: torch.dtype) -> dict[str, Any]:
    """``opcheck`` of both ops, bytes of one exchange, and whether a second one reuses the buffers."""
    degree = dist.get_world_size()
    degrees = Degrees(data=1, head=degree)
    ring = open_ring(degrees, dist.get_rank(), timedelta(seconds=60))
    try:
        q, k = (torch.randn(2, heads, 4, 8, dtype=dtype, requires_grad=True) for heads in (2 * degree, 1))
        before = find_ring(ring).sent_bytes["head"]  # type: ignore[union-attr]
        local, *_ = trade_tokens_for_heads(q, k, k, ring, degree)
        sent = find_ring(ring).sent_bytes["head"] - before  # type: ignore[union-attr]
        kept, copy = local, local.clone()
        trade_tokens_for_heads(-q, -k, -k, ring, degree)
        back = trade_heads_for_tokens(local, ring, degree)
        checks = torch.library.opcheck(split_heads._opoverload, ([q, k], ring, degree))
        grads = [torch.randn(2, 1, 8, 8, dtype=dtype, requires_grad=True) for _ in range(2)]
        checks |= torch.library.opcheck(join_heads._opoverload, (grads, [degree, 1], ring, degree))
        return {
            "checks": set(checks.values()),
            "sent": sent,
            "kept": torch.equal(kept, copy),
            "back": torch.equal(back, q),
        }
    finally:
        close_ring(ring)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_between_processes(gloo: Callable[[int], GlooPool], dtype: torch.dtype) -> None:
    for found in gloo(2).run(ops_on_rank, dtype):
        # To the one peer: 2 samples x 4 tokens x (2 query heads + 2 copies of a key and of a value head) x 8 wide.
        assert found == {"checks": {"SUCCESS"}, "sent": 2 * 4 * 4 * 8 * dtype.itemsize, "kept": True, "back": True}


def wrong_ring(degrees: Degrees) -> str:
    ring = open_ring(degrees, dist.get_rank(), timedelta(seconds=60))
    try:
        with pytest.raises(ValueError, match="head=4") as error:
            trade_heads_for_tokens(torch.zeros(1, 1, 4, 1), ring, 4)
        return str(error.value)
    finally:
        close_ring(ring)


def test_a_ring_without_these_head_ranks(gloo: Callable[[int], GlooPool]) -> None:
    for degrees in (Degrees(data=1, head=2), Degrees(data=1, context=2), Degrees(data=2)):
        for message in gloo(2).run(wrong_ring, degrees):
            assert "does not have so many head ranks" in message
