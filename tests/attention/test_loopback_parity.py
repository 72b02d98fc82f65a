"""Ring attention on all ranks in lockstep against plain masked softmax: out, dq, dk and dv together."""

import pytest
import torch

from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.counts import sent_bytes
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.layout import LAYOUTS
from lightning_longctx.testing.loopback import attention_over_ranks
from lightning_longctx.testing.oracle import attention_oracle, dense_mask
from lightning_longctx.testing.tolerances import assert_close_relative, tolerance

RINGS = [(1, 1), (2, 2), (2, 1), (3, 3), (4, 4), (4, 2), (8, 8), (8, 4), (8, 2), (16, 4)]


def inputs(length, dtype, heads=4, kv_heads=2, batch=1, width=8, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, length, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype) for shape in shapes]


def oracle(query, key, value, grad, mask=None):
    """Out, dq, dk, dv in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    out, _ = attention_oracle(*leaves, mask=mask)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def check(result, expected, dtype):
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        assert_close_relative(result[index], expected[index], name, tolerance(dtype, grad=index > 0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "inner"), RINGS)
@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize(("kv_heads", "batch"), [(4, 1), (2, 2), (1, 1)])
def test_float64(layout, num_ranks, inner, backend, kv_heads, batch):
    tensors = inputs(32, torch.float64, kv_heads=kv_heads, batch=batch)
    result = attention_over_ranks(*tensors, layout=layout, num_ranks=num_ranks, inner=inner, backend=backend)
    check(result, oracle(*tensors), torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "inner"), [(2, 2), (4, 2), (8, 4)])
@pytest.mark.parametrize("length", [1, 5, 37, 63])
def test_uneven_and_empty_shards(layout, num_ranks, inner, length):
    tensors = inputs(length, torch.float64)
    result = attention_over_ranks(*tensors, layout=layout, num_ranks=num_ranks, inner=inner)
    check(result, oracle(*tensors), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_narrow_dtypes(dtype, backend):
    tensors = inputs(64, dtype)
    result = attention_over_ranks(*tensors, layout="zigzag", num_ranks=4, inner=2, backend=backend)
    assert result.out.dtype == dtype
    check(result, oracle(*tensors), dtype)


@pytest.mark.parametrize("mask", [Mask(causal=False), Mask(window=3), Mask(window=20)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_carry_other_masks(mask, layout):
    """The planner and the executor know bands already; the reference backend computes any."""
    tensors = inputs(24, torch.float64)
    dense = dense_mask(24, causal=mask.causal, window=mask.window)
    result = attention_over_ranks(*tensors, layout=layout, num_ranks=4, inner=2, mask=mask, backend="reference")
    check(result, oracle(*tensors, mask=dense), torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "inner"), [(2, 2), (4, 2), (8, 4), (16, 4)])
@pytest.mark.parametrize("length", [64, 37])
def test_sent_bytes_equal_planned_bytes(layout, num_ranks, inner, length):
    query, key, value, grad = inputs(length, torch.bfloat16)
    result = attention_over_ranks(query, key, value, grad, layout=layout, num_ranks=num_ranks, inner=inner)
    per_token = 2 * key.shape[1] * key.shape[3]
    for rank, counted in enumerate(result.sent_bytes):
        plan = plan_attention(length, layout, num_ranks, inner, rank)
        hops = (*plan.forward.sent, *plan.backward.sent)
        assert counted == sent_bytes(hops, plan.shards, inner, key_bytes=2 * per_token, gradient_bytes=4 * per_token)


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_bfloat16_error_does_not_grow_with_ring_size(backend):
    """B42: partial results are merged in float32: many hops are little worse than one shot, and 8 no worse than 2."""
    tensors = inputs(128, torch.bfloat16, heads=2, kv_heads=2, width=16)
    expected = oracle(*tensors)

    def errors(num_ranks):
        result = attention_over_ranks(*tensors, layout="zigzag", num_ranks=num_ranks, inner=num_ranks, backend=backend)
        return [(result[i].double() - expected[i]).square().mean().sqrt().item() for i in range(4)]

    rounding = (expected[0].to(torch.bfloat16).double() - expected[0]).square().mean().sqrt().item()
    one, two, eight = errors(1), errors(2), errors(8)
    assert two[0] <= 1.5 * rounding and eight[0] <= 1.5 * rounding
    assert all(many <= 1.5 * once for many, once in zip(two + eight, one + one, strict=True))
    assert all(many <= 1.15 * few for many, few in zip(eight, two, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_parts_with_far_apart_logits_merge_exactly(causal):
    """B40: the lse of two shards differ by 120; log(1 + exp(x)) would overflow and give 0, still finite."""
    query = torch.ones(1, 1, 8, 4)
    key = torch.full((1, 1, 8, 4), 30.0)
    key[:, :, 4:] = -30.0
    value, grad = torch.arange(32.0).sin().reshape(1, 1, 8, 4), torch.ones(1, 1, 8, 4)
    mask = Mask(causal=causal)
    result = attention_over_ranks(
        query,
        key,
        value,
        grad,
        layout="contiguous",
        num_ranks=2,
        inner=2,
        mask=mask,
        backend="reference" if not causal else "auto",
    )
    expected = oracle(query, key, value, grad, mask=dense_mask(8, causal=causal))
    for index in range(4):
        torch.testing.assert_close(result[index].double(), expected[index], rtol=1e-5, atol=1e-5)


def test_backward_uses_the_final_lse_and_all_blocks():
    """B43: scaled logits, 3 and 4 ranks, as many heads as local tokens, transposed views of one fused tensor."""
    for num_ranks, length, heads in ((3, 12, 2), (4, 12, 3)):
        fused = inputs(length, torch.float64, heads=3 * heads, kv_heads=1, seed=1, scale=1.5)[0]
        query, key, value = fused.transpose(1, 2).chunk(3, dim=2)
        views = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        grad = inputs(length, torch.float64, heads=heads, seed=2)[0]
        result = attention_over_ranks(*views, grad, layout="contiguous", num_ranks=num_ranks, inner=num_ranks)
        check(result, oracle(*views, grad), torch.float64)
