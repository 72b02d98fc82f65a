"""The oracle against torch's own attention, against finite differences, and at its edges."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.sequence import LAYOUTS, layout_ranges
from lightning_longctx.testing import (
    FLOAT64,
    assert_close_relative,
    attention_oracle,
    dense_mask,
    gather_shards,
    take_shard,
)


def leaves(*shape_of_qkv: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shape_of_qkv]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, dense_mask(7, window=3), dense_mask(7, causal=False, documents=[2, 4, 1])])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_values_and_gradients_equal_torchs(kv_heads: int, mask: torch.Tensor | None, scale: float | None) -> None:
    inputs = leaves((2, 4, 7, 5), (2, kv_heads, 7, 5), (2, kv_heads, 7, 3))
    q, k, v = inputs
    out, lse = attention_oracle(q, k, v, mask, scale)
    expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    assert_close_relative(out, expected, "out", FLOAT64)
    assert lse.shape == (2, 4, 7)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True)
    for name, grad, other in zip("qkv", grads, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        assert_close_relative(grad, other, f"d{name}", FLOAT64)


def test_lse_is_the_logarithm_of_the_sum() -> None:
    q, k, v = leaves((1, 1, 4, 3), (1, 1, 4, 3), (1, 1, 4, 3))
    _, lse = attention_oracle(q, k, v, scale=2.0)
    for row in range(4):
        scores = 2.0 * (q[0, 0, row] * k[0, 0, : row + 1]).sum(-1)
        assert_close_relative(lse[0, 0, row], scores.logsumexp(0), f"lse of row {row}", FLOAT64)


def test_a_sink_is_one_more_key_whose_value_is_nothing() -> None:
    """A key of its own for each head, here by hand: queries are extended so that its logit is the sink's."""
    q, k, v = leaves((2, 4, 5, 3), (2, 4, 5, 3), (2, 4, 5, 3))
    sinks = torch.tensor([-3.0, 0.0, 2.0, 60.0], dtype=torch.float64).requires_grad_()
    out, lse = attention_oracle(q, k, v, scale=0.7, sinks=sinks)
    one = torch.ones(2, 4, 5, 1, dtype=torch.float64)
    sink_key = torch.cat([torch.zeros(2, 4, 1, 3), (sinks / 0.7).view(1, 4, 1, 1).expand(2, 4, 1, 1)], -1)
    wide = torch.cat([torch.cat([k, 0 * one], -1), sink_key], 2), F.pad(v, (0, 0, 0, 1))
    mask = torch.cat([dense_mask(5), torch.ones(5, 1, dtype=torch.bool)], -1)
    expected, expected_lse = attention_oracle(torch.cat([q, one], -1), *wide, mask, scale=0.7)
    assert_close_relative(out, expected, "out", FLOAT64)
    assert_close_relative(lse, expected_lse, "lse", FLOAT64)
    weight = torch.randn_like(out)
    grads, others = (torch.autograd.grad((o * weight).sum(), (q, k, v, sinks)) for o in (out, expected))
    for name, grad, other in zip(("q", "k", "v", "sinks"), grads, others, strict=True):
        assert_close_relative(grad, other, f"d{name}", FLOAT64)


def test_a_query_that_sees_only_its_sink_attends_to_nothing() -> None:
    q, k, v = leaves((1, 1, 2, 3), (1, 1, 2, 3), (1, 1, 2, 3))
    sinks = torch.tensor([1.5], dtype=torch.float64).requires_grad_()
    out, lse = attention_oracle(q, k, v, torch.tensor([[True, True], [False, False]]), sinks=sinks)
    assert (out[0, 0, 1] == 0).all() and lse[0, 0, 1] == 1.5
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v, sinks)))


def test_gradcheck_with_a_row_that_sees_no_key() -> None:
    mask = dense_mask(4)
    mask[2] = False
    inputs = leaves((1, 2, 4, 3), (1, 1, 4, 3), (1, 1, 4, 3))

    def finite_part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention_oracle(q, k, v, mask)
        return out, lse[..., [0, 1, 3]]

    assert torch.autograd.gradcheck(finite_part, inputs)


def test_a_row_that_sees_no_key() -> None:
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[1, 0] = True
    inputs = leaves((1, 1, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2))
    out, lse = attention_oracle(*inputs, mask=mask)
    assert torch.equal(out[0, 0, [0, 2]], torch.zeros(2, 2, dtype=torch.float64))
    assert lse[0, 0].tolist()[0::2] == [-math.inf, -math.inf]
    dq, dk, dv = torch.autograd.grad(out.sum() + lse[0, 0, 1], inputs)
    assert torch.equal(dq[0, 0, [0, 2]], torch.zeros(2, 2, dtype=torch.float64))
    assert_close_relative(dq[0, 0, 1], inputs[1][0, 0, 0] * 2**-0.5, "dq", FLOAT64)
    assert_close_relative(dk[0, 0, 0], inputs[0][0, 0, 1] * 2**-0.5, "dk", FLOAT64)
    assert dv[0, 0].tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_scores_far_below_any_finite_sentinel() -> None:
    q, k, v = (torch.tensor(rows).reshape(1, 1, -1, 1) for rows in ([-65000.0], [1.0, 0.0], [1.0, 100.0]))
    out, lse = attention_oracle(q, k, v, torch.tensor([[True, False]]), scale=1.0)
    assert (out.item(), lse.item()) == (1.0, -65000.0)


def test_masks() -> None:
    assert dense_mask(3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert dense_mask(16, window=4).sum(-1).tolist() == [1, 2, 3] + [4] * 13
    assert dense_mask(3, documents=[1, 0, 2]).int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert dense_mask(2, causal=False).all()


def test_what_has_no_answer_is_refused() -> None:
    q, k = torch.zeros(1, 4, 3, 2), torch.zeros(1, 3, 3, 2)
    with pytest.raises(ValueError, match="4 query heads can't be grouped over 3"):
        attention_oracle(q, k, k)
    with pytest.raises(ValueError, match="ambiguous"):
        attention_oracle(q, q[:, :, :2], q[:, :, :2])
    with pytest.raises(ValueError, match="window=2"):
        dense_mask(3, causal=False, window=2)
    with pytest.raises(ValueError, match="window=0"):
        dense_mask(3, window=0)
    with pytest.raises(ValueError, match="not length=3"):
        dense_mask(3, documents=[1, 1])
    with pytest.raises(ValueError, match="exactly once"):
        gather_shards([q, q], [(range(0, 3),), (range(2, 5),)], dim=2)


@given(
    layout=st.sampled_from(LAYOUTS),
    length=st.integers(1, 40),
    num_ranks=st.integers(1, 8),
    dim=st.sampled_from([1, -2]),
)
def test_shards_make_the_whole_again(layout: str, length: int, num_ranks: int, dim: int) -> None:
    whole = torch.arange(2 * length * 3, dtype=torch.float64).reshape(2, length, 3).requires_grad_()
    all_ranges = layout_ranges(layout, length, num_ranks)  # type: ignore[arg-type]
    shards = [take_shard(whole, ranges, dim) for ranges in all_ranges]
    positions = [[index for piece in ranges for index in piece] for ranges in all_ranges]
    for shard, held in zip(shards, positions, strict=True):
        assert torch.equal(shard, whole[:, held])
    again = gather_shards(shards, all_ranges, dim)
    assert torch.equal(again, whole)
    weight = torch.rand_like(whole)
    assert torch.equal(torch.autograd.grad((again * weight).sum(), whole)[0], weight)
