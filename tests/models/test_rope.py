"""Rotary positions: values, gradients, precision, and that only differences of positions matter."""

from __future__ import annotations

import pytest
import torch

from lightning_longctx.models import rotary_angles, rotary_frequencies, rotate

from . import reference


def test_frequencies() -> None:
    got = rotary_frequencies(8, 10000.0, device=torch.device("cpu"), dtype=torch.float32)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.1, 0.01, 0.001]))


@pytest.mark.parametrize("autocast", [False, True])
def test_float32_positions_even_under_autocast_and_for_bfloat16_heads(autocast: bool) -> None:
    torch.manual_seed(0)
    heads = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16)
    position_ids = torch.randint(100_000, (2, 5))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        cosine, sine = rotary_angles(position_ids, 8, 10000.0)
        got = rotate(heads, cosine, sine)
    assert (cosine.dtype, sine.dtype, got.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert cosine.shape == (2, 1, 5, 4)
    expected = reference.rotate(heads.double(), position_ids, 10000.0)
    # bfloat16 angles would be off by whole turns; what is left is one rounding of the result and of float32 angles.
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=0.02)


def test_float64_heads_stay_float64_with_gradients() -> None:
    torch.manual_seed(0)
    heads = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    position_ids = torch.randint(1_000_000, (2, 5))
    got = rotate(heads, *rotary_angles(position_ids, 8, 10000.0, torch.float64))
    expected = reference.rotate(heads, position_ids, 10000.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    upstream = torch.randn_like(heads)
    gradients = [torch.autograd.grad(result, heads, upstream)[0] for result in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def test_scores_depend_on_differences_of_positions_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 6, 16, dtype=torch.float64)

    def scores(start: int) -> torch.Tensor:
        angles = rotary_angles(torch.arange(start, start + 6)[None], 16, 10000.0, torch.float64)
        return rotate(query, *angles) @ rotate(key, *angles).transpose(-1, -2)

    torch.testing.assert_close(scores(0), scores(12345), rtol=0, atol=1e-9)


def test_a_shard_turns_by_its_own_positions() -> None:
    torch.manual_seed(0)
    heads = torch.randn(1, 2, 16, 8)
    whole = rotate(heads, *rotary_angles(torch.arange(16)[None], 8, 10000.0))
    shard = torch.tensor([0, 1, 14, 15])
    torch.testing.assert_close(
        rotate(heads[:, :, shard], *rotary_angles(shard[None], 8, 10000.0)), whole[:, :, shard], rtol=0, atol=0
    )
