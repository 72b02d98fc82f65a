"""The output matrix and cross entropy in tiles give the sums and gradients of whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_longctx.loss import linear_cross_entropy, token_cross_entropy
from lightning_longctx.loss.linear_cross_entropy import auto_tile_tokens

WIDTH = 8


def inputs(
    tokens: int, vocab: int = 33, dtype: torch.dtype = torch.float32, masked: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States [2, tokens, 8], matrix, bias and labels."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, tokens, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64) * 0.3
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (2, tokens), generator=generator)
    labels[torch.rand(2, tokens, generator=generator) < masked] = -100
    made = (each.to(dtype).requires_grad_() for each in (states, weight, bias))
    return *made, labels  # type: ignore[return-value]


def step(tile_tokens: int | None, given: tuple[Tensor, ...], with_bias: bool = True) -> dict[str, Tensor]:
    """Sum, count and gradients of the mean; of whole logits if ``tile_tokens`` is 0."""
    states, weight, bias, labels = given
    matrix_bias = bias if with_bias else None
    if tile_tokens == 0:
        total, count = token_cross_entropy(F.linear(states, weight, matrix_bias), labels)
    else:
        total, count = linear_cross_entropy(states, weight, labels, bias=matrix_bias, tile_tokens=tile_tokens)
    wanted = {"states": states, "weight": weight} | ({"bias": bias} if with_bias else {})
    wanted = {name: each for name, each in wanted.items() if each.requires_grad}
    gradients = torch.autograd.grad(total / count.clamp(min=1), list(wanted.values()))
    return {"total": total.detach(), "count": count} | dict(zip(wanted, gradients, strict=True))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, right in expected.items():
        assert actual[name].dtype == right.dtype and actual[name].shape == right.shape, name
        error = (actual[name].double() - right.double()).norm()
        assert error <= tolerance * right.double().norm().clamp(min=1e-3), f"{name} is off by {float(error):.3g}"


@pytest.mark.parametrize("masked", [0.0, 0.3, 0.9, 1.1])
@pytest.mark.parametrize("tile_tokens", [1, 2, 3, 5, 7, 16, 17, 33, 34, 35, 1000, None])
def test_every_tile_size_gives_the_numbers_of_whole_logits(tile_tokens: int | None, masked: float) -> None:
    given = inputs(17, masked=masked)
    assert_same(step(tile_tokens, given), step(0, given))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocab=st.integers(1, 50),
    tile_tokens=st.integers(1, 90),
    masked=st.sampled_from([0.0, 0.2, 0.8, 1.1]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_in_float64_only_the_last_digits_differ(
    tokens: int, vocab: int, tile_tokens: int, masked: float, with_bias: bool, seed: int
) -> None:
    given = inputs(tokens, vocab, torch.float64, masked, seed)
    assert_same(step(tile_tokens, given, with_bias), step(0, given, with_bias), 1e-12)


def test_masked_stretches_cost_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    plain = F.linear
    monkeypatch.setattr(F, "linear", lambda *given: rows.append(len(given[0])) or plain(*given))
    states, weight, _, labels = inputs(16, masked=0.0)
    labels[:, 2:12] = -100
    linear_cross_entropy(states, weight, labels, tile_tokens=4)
    assert rows == [4, 4, 4]
    rows.clear()
    total, count = linear_cross_entropy(states, weight, torch.full_like(labels, -100), tile_tokens=4)
    assert not rows and count == 0
    total.backward()
    assert states.grad is not None and not states.grad.any() and weight.grad is not None and not weight.grad.any()


def test_no_tokens_at_all() -> None:
    given = inputs(0)
    result = step(4, given)
    assert result["total"] == 0 and result["count"] == 0
    assert result["states"].shape == (2, 0, WIDTH) and not result["weight"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile_tokens", [3, 100])
def test_narrow_tensors_err_no_more_than_whole_logits_do(dtype: torch.dtype, tile_tokens: int) -> None:
    narrow = inputs(64, dtype=dtype)
    exact = (*(each.detach().double().requires_grad_() for each in narrow[:3]), narrow[3])
    expected, whole, tiled = step(0, exact), step(0, narrow), step(tile_tokens, narrow)
    assert tiled["total"].dtype == torch.float32 and torch.allclose(tiled["total"], whole["total"], rtol=1e-6)
    for name in ("states", "weight", "bias"):
        assert tiled[name].dtype == dtype
        errors = [(each[name].double() - expected[name]).norm() for each in (tiled, whole)]
        assert errors[0] <= 1.5 * errors[1], name


def test_sums_that_leave_the_range_of_float16_are_kept_until_they_are_scaled() -> None:
    states = torch.full((3000, WIDTH), 60.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(4, WIDTH, dtype=torch.float16, requires_grad=True)
    total, count = linear_cross_entropy(states, weight, torch.zeros(3000, dtype=torch.int64), tile_tokens=1000)
    (total / count).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[:, 0], torch.tensor([-45.0, 15.0, 15.0, 15.0], dtype=torch.float16))


@pytest.mark.parametrize("tile_tokens", [3, 100])
def test_under_autocast_logits_are_rounded_as_those_of_a_linear_layer(tile_tokens: int) -> None:
    given = inputs(64)
    exact = step(0, inputs(64, dtype=torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, tiled = step(0, given), step(tile_tokens, given)
        double = step(tile_tokens, inputs(64, dtype=torch.float64))
    assert torch.allclose(tiled["total"], whole["total"], rtol=1e-6)
    assert abs(tiled["total"] - exact["total"]) > 1e-5 * exact["total"]  # they are rounded
    for name in ("states", "weight", "bias"):
        assert tiled[name].dtype == torch.float32
        assert (tiled[name].double() - exact[name]).norm() <= 1.5 * (whole[name].double() - exact[name]).norm(), name
    assert_same(double, exact, 1e-12)


@pytest.mark.parametrize("frozen", ["states", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient_and_costs_no_product(frozen: str) -> None:
    given = inputs(17)
    dict(zip(("states", "weight", "bias"), given, strict=False))[frozen].requires_grad_(False)
    assert_same(step(4, given), step(0, given))


def test_without_gradients_nothing_but_the_sum_is_computed() -> None:
    given = inputs(17)
    with torch.no_grad():
        total, _ = linear_cross_entropy(*given[:2], given[3], tile_tokens=4)
    assert not total.requires_grad
    assert torch.allclose(total, token_cross_entropy(F.linear(*given[:2]), given[3])[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, torch.no_grad():
        linear_cross_entropy(*given[:2], given[3], tile_tokens=1000)
    products = [
        event.count for event in seen.key_averages() if event.key in ("aten::mm", "aten::addmm", "aten::addmm_")
    ]
    assert sum(products) == 1


def test_gradients_add_up_over_backwards() -> None:
    given = inputs(17)
    for _ in range(2):
        total, _ = linear_cross_entropy(*given[:2], given[3], tile_tokens=4)
        (total * 0.5).backward()
    expected = torch.autograd.grad(token_cross_entropy(F.linear(*given[:2]), given[3])[0], given[:2])
    for each, right in zip(given, expected, strict=False):
        torch.testing.assert_close(each.grad, right)


def test_a_second_backward_is_an_error_and_so_is_a_second_derivative() -> None:
    given = inputs(5)
    total, _ = linear_cross_entropy(*given[:2], given[3])
    total.backward(retain_graph=True)
    before = given[1].grad.clone()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="used up by the first one"):
        total.backward()
    assert torch.equal(before, given[1].grad)  # type: ignore[arg-type]
    total, _ = linear_cross_entropy(*given[:2], given[3])
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(total, given[:1], create_graph=True)


def test_what_does_not_fit_is_refused() -> None:
    states, weight, _, labels = inputs(5)
    for wrong in (torch.full_like(labels, 33), torch.full_like(labels, -1)):
        with pytest.raises(ValueError, match="vocabulary of 33"):
            linear_cross_entropy(states, weight, wrong)
    with pytest.raises(ValueError, match="one label for each vector"):
        linear_cross_entropy(states, weight, labels[:, :4])
    with pytest.raises(ValueError, match="tile_tokens=0 must be at least 1"):
        linear_cross_entropy(states, weight, labels, tile_tokens=0)


def test_compiled_code_gives_the_same_numbers() -> None:
    given = inputs(9)
    expected = torch.autograd.grad(token_cross_entropy(F.linear(*given[:2]), given[3])[0] * 2, given[:2])
    compiled = torch.compile(lambda *each: linear_cross_entropy(*each, tile_tokens=4)[0] * 2, backend="aot_eager")
    for actual, right in zip(torch.autograd.grad(compiled(*given[:2], given[3]), given[:2]), expected, strict=True):
        torch.testing.assert_close(actual, right)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no tiled loss of its own")
def test_torch_has_the_same_numbers() -> None:
    states, weight, bias, labels = inputs(40)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)
    arguments = (states.flatten(0, 1), weight, labels.flatten())
    total = F.linear_cross_entropy(*arguments, linear_bias=bias, reduction="sum", options=options)
    expected = torch.autograd.grad(total, (states, weight, bias))
    ours, _ = linear_cross_entropy(states, weight, labels, bias=bias, tile_tokens=16)
    torch.testing.assert_close(ours, total)
    for actual, right in zip(torch.autograd.grad(ours, (states, weight, bias)), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-6)


def test_tiles_have_about_64_mib_of_logits() -> None:
    assert auto_tile_tokens(49152) == 320
    assert auto_tile_tokens(151936) == 128 and auto_tile_tokens(10**7) == 128
    assert auto_tile_tokens(32) == 524288 and auto_tile_tokens(0) > 0
