"""Uninitialised memory is NaN in tests; what sets its memory works as before."""

from __future__ import annotations

import pytest
import torch

from lightning_longctx.testing import poisoned_empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_floating_memory_is_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(2, 3, dtype=dtype)
    made = [
        torch.empty(2, 3, dtype=dtype),
        torch.empty((2, 3), dtype=dtype, requires_grad=True),
        torch.empty_like(like),
        torch.empty_strided((2, 3), (1, 2), dtype=dtype),
        torch.empty_permuted((2, 3), (1, 0), dtype=dtype),
        like.new_empty(2, 3),
        like.new_empty_strided((2, 3), (3, 1)),
    ]
    for tensor in made:
        assert tensor.shape == (2, 3) and tensor.dtype == dtype and tensor.isnan().all()
    assert made[1].is_leaf and made[1].requires_grad


def test_integers_and_modules_are_left_alone() -> None:
    assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
    layer = torch.nn.Linear(3, 3)
    assert layer(torch.ones(3)).isfinite().all()


def test_device_contexts_still_redirect() -> None:
    with torch.device("meta"):
        assert torch.empty(2).is_meta and torch.empty_like(torch.ones(2)).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta


def test_compiled_code_is_poisoned_too() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def partly_written(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:1] = x[:1]
        return out

    assert partly_written(torch.ones(2)).isnan().tolist() == [False, True]


def test_the_originals_come_back() -> None:
    before = torch.empty, torch.Tensor.new_empty
    with poisoned_empty():
        assert torch.empty is not before[0]
    assert (torch.empty, torch.Tensor.new_empty) == before
