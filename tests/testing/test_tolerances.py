"""Comparison passes rounding, fails everything else, and says where."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_longctx.testing import (
    assert_all_close_relative,
    assert_close_relative,
    attention_oracle,
    relative_error,
    tolerance,
)

EXPECTED = torch.tensor([3.0, 4.0, 0.0])


def test_error_is_relative_to_the_whole_tensor() -> None:
    assert relative_error(torch.tensor([3.0, 4.0, 5e-3]), EXPECTED) == pytest.approx(1e-3)
    assert relative_error(torch.tensor([3e-3]), torch.zeros(1)) == pytest.approx(3e-3)
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert_close_relative(EXPECTED + 1e-6, EXPECTED)


def test_message_names_tensor_size_and_place() -> None:
    with pytest.raises(AssertionError, match=r"dk: relative error 0.2 exceeds 1e-05.*at \[2\]: 1, expected 0\."):
        assert_close_relative(torch.tensor([3.0, 4.0, 1.0]), EXPECTED, "dk")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(bad: float) -> None:
    with pytest.raises(AssertionError, match=r"at \[1\].*1 of 3 entries are not finite"):
        assert_close_relative(torch.tensor([3.0, bad, 0.0]), EXPECTED, rtol=1.0)
    with pytest.raises(AssertionError, match="not finite"):
        assert_close_relative(EXPECTED, torch.tensor([3.0, bad, 0.0]), rtol=1.0)


def test_equal_infinities_agree_and_do_not_hide_the_rest() -> None:
    lse = torch.tensor([-math.inf, 1.0])
    assert_close_relative(lse.clone(), lse)
    with pytest.raises(AssertionError, match=r"at \[1\]"):
        assert_close_relative(torch.tensor([-math.inf, 1.1]), lse)
    with pytest.raises(AssertionError, match=r"at \[0\]"):
        assert_close_relative(torch.tensor([math.inf, 1.0]), lse)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"out: shape \(3, 1\), expected \(3,\)"):
        assert_close_relative(EXPECTED[:, None], EXPECTED, "out")


def test_state_dicts_report_every_difference() -> None:
    expected = {"a": EXPECTED, "b": EXPECTED, "c": EXPECTED}
    assert_all_close_relative(dict(expected), expected)
    with pytest.raises(AssertionError, match=r"2 of 3 differ:\nweight a: .*\nweight c: "):
        assert_all_close_relative({"a": EXPECTED + 1, "b": EXPECTED, "c": EXPECTED * 2}, expected, "weight")
    with pytest.raises(AssertionError, match=r"missing \['c'\], not expected \['d'\]"):
        assert_all_close_relative({"a": EXPECTED, "b": EXPECTED, "d": EXPECTED}, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_own_attention_is_within_tolerance_and_not_by_far(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    exact = [torch.randn(1, 2, 128, 16, generator=generator).to(dtype).double().requires_grad_() for _ in range(3)]
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    expected, _ = attention_oracle(exact[0], exact[1], exact[2])
    out = F.scaled_dot_product_attention(rounded[0], rounded[1], rounded[2], is_causal=True)
    weight = torch.randn(out.shape, generator=generator).to(dtype)
    assert_close_relative(out, expected, "out", tolerance(dtype))
    grads = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for name, actual, grad in zip("qkv", torch.autograd.grad((out * weight).sum(), rounded), grads, strict=True):
        assert_close_relative(actual, grad, f"d{name}", tolerance(dtype, grad=True))
    if dtype != torch.float32:
        with pytest.raises(AssertionError):
            assert_close_relative(out, expected, "out", tolerance(dtype) / 10)


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="torch.int64"):
        tolerance(torch.int64)
