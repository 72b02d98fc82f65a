"""Head parallelism keeps samples apart, shares key/value heads rightly, and sums their gradients."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.attention.exchange import trade_heads_for_tokens, trade_tokens_for_heads
from lightning_longctx.attention.rings import close_ring, open_ring
from lightning_longctx.testing import GlooPool
from lightning_longctx.testing.oracle import attention_oracle
from lightning_longctx.testing.tolerances import assert_close_relative
from lightning_longctx.topology import Degrees

Pools = Callable[[int], GlooPool]
FOUR = Degrees(data=1, head=4)


def fused(num_heads: int, num_kv_heads: int, width: int, length: int, dtype: torch.dtype) -> Tensor:
    """Query, key and value of two samples as one projection gives them: [2, length, (Hq + 2 Hkv) * width]."""
    size = 2 * length * (num_heads + 2 * num_kv_heads) * width
    return (
        torch.randn(size, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype).view(2, length, -1)
    )


def views(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Transposed views [B, H, T, D] into the projection."""
    heads = qkv.unflatten(2, (num_heads + 2 * num_kv_heads, -1)).transpose(1, 2)
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return query, key, value


def tags() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """This rank's part of unique integers, what the exchange makes of it, and what comes back."""
    ring, rank = open_ring(FOUR, dist.get_rank(), timedelta(seconds=60)), dist.get_rank()
    shard = torch.arange(2 * 8 * 4).view(2, 8, 4, 1).double()[:, 2 * rank : 2 * rank + 2].transpose(1, 2)
    query, key, value = trade_tokens_for_heads(shard, -shard, shard + 0.5, ring, 4)
    back = trade_heads_for_tokens(query, ring, 4)
    close_ring(ring)
    return shard, query, key, value, back


def test_tags_go_where_they_belong_and_come_back(gloo: Pools) -> None:
    """B25: with two samples, to the head's rank and back."""
    whole = torch.arange(2 * 8 * 4).view(2, 8, 4, 1).double().transpose(1, 2)
    for rank, (shard, query, key, value, back) in enumerate(gloo(4).run(tags)):
        mine = whole[:, rank : rank + 1]
        assert torch.equal(query, mine) and torch.equal(key, -mine) and torch.equal(value, mine + 0.5)
        assert torch.equal(back, shard)


def attention(degrees: Degrees, qkv: Tensor, heads: tuple[int, int], grad: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's output and gradient of the fused projection, each for its own tokens."""
    ring, rank, degree = open_ring(degrees, dist.get_rank(), timedelta(seconds=60)), dist.get_rank(), degrees.head
    shard = qkv.chunk(degree, 1)[rank].clone().requires_grad_()
    query, key, value = trade_tokens_for_heads(*views(shard, *heads), ring, degree)
    local, _ = attention_oracle(query, key, value)
    out = trade_heads_for_tokens(local, ring, degree)
    out.backward(grad.chunk(degree, 2)[rank])
    close_ring(ring)
    assert shard.grad is not None
    return out.detach(), shard.grad


@pytest.mark.parametrize(("world", "heads"), [(4, (8, 2)), (4, (8, 1)), (4, (8, 4)), (2, (8, 2)), (3, (6, 6))])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_grouped_heads(gloo: Pools, world: int, heads: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    """B25: key/value heads fewer than head ranks, as many, and more; output and all gradients."""
    qkv = fused(*heads, width=4, length=12, dtype=dtype)
    grad = torch.randn(2, heads[0], 12, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    results = gloo(world).run(attention, Degrees(data=1, head=world), qkv, heads, grad.to(dtype))
    whole = qkv.double().requires_grad_()
    expected, _ = attention_oracle(*views(whole, *heads))
    expected.backward(grad.to(dtype).double())
    assert whole.grad is not None
    assert_close_relative(torch.cat([out for out, _ in results], 2), expected, "out", tolerance)
    dqkv = torch.cat([shard for _, shard in results], 1)
    for name, actual, right in zip("qkv", views(dqkv, *heads), views(whole.grad, *heads), strict=True):
        assert_close_relative(actual, right, f"d{name}", tolerance)


def refused() -> str:
    ring = open_ring(FOUR, dist.get_rank(), timedelta(seconds=60))
    tensor = torch.zeros(2, 6, 2, 4)
    try:
        trade_tokens_for_heads(tensor, tensor, tensor, ring, 4)
    except ValueError as error:
        return str(error)
    finally:
        close_ring(ring)
    return ""


def test_heads_that_do_not_fit(gloo: Pools) -> None:
    """B25: six heads over four ranks."""
    for message in gloo(4).run(refused):
        assert "head=4 does not fit 6 query heads and 6 key/value heads" in message
        assert "Use head=1 or 2 or 3 or 6." in message
