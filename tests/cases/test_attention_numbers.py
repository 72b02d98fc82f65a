"""Numbers of ring attention between real processes that a wrong merge, mask or backward pass would spoil."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx import Degrees, attend
from lightning_longctx.attention import close_ring, open_ring
from lightning_longctx.plan.communication import Communication
from lightning_longctx.sequence import SequenceRecord
from lightning_longctx.testing import attention_oracle, dense_mask, gather_shards, take_shard
from lightning_longctx.topology import CONTEXT, axis_rank

NAMES = ("out", "dq", "dk", "dv")
HYBRID = Degrees(1, 2, head=2)


@pytest.mark.parametrize("schedule", ["double_ring", "direct", "all_gather"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("degrees", [Degrees(1, 2), Degrees(1, 4, 2), HYBRID])
def test_shards_whose_logits_are_far_apart(
    gloo: Any, degrees: Degrees, layout: str, causal: bool, schedule: str
) -> None:
    """B40: the lse of the first and the second half differ by 120; the log of 1 + exp would overflow and give 0."""
    heads = degrees.head
    key = torch.full((1, 8, heads, 4), 30.0)
    key[:, 4:] = -30.0
    value = torch.arange(32.0).sin().reshape(1, 8, 1, 4).expand(1, 8, heads, 4)
    fused = torch.cat([tensor.flatten(2) for tensor in (torch.ones_like(key), key, value)], dim=-1)
    grad = torch.ones(1, heads, 8, 4)
    found = joined(gloo, degrees, layout, fused, grad, 0.5, "auto", schedule, causal)
    for name, actual, expected in zip(NAMES, found, by_hand(fused, grad, 0.5, causal), strict=True):
        tolerance = 1e-5 if name == "out" else 2e-5
        torch.testing.assert_close(
            actual.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def ring(degrees: Degrees, layout: Any, fused: Tensor, grad: Tensor, scale: float, *options: Any) -> Any:
    """Held positions, out, dq, dk, dv of this rank; query, key and value are views into one tensor [B, S, 3 * H * D].

    ``options`` are the backend, the schedule and whether the mask is causal.
    """
    backend, schedule, causal = (*options, *("auto", "auto", True)[len(options) :])
    rank, length = dist.get_rank(), fused.shape[1]
    name = open_ring(degrees, rank, timedelta(seconds=60), Communication(schedule))
    place = axis_rank(degrees, rank, *CONTEXT), degrees.head, axis_rank(degrees, rank, "head")
    record = SequenceRecord(length, layout, degrees.context, degrees.inner, *place, ring=name, backend=backend)
    part = take_shard(fused, record.ranges, 1).requires_grad_()
    views = heads_of(part, grad)
    assert record.num_local_tokens < 2 or not any(view.is_contiguous() for view in views)
    out = attend(*views, sequence=record, scale=scale, causal=causal)
    (dpart,) = torch.autograd.grad(out, part, take_shard(grad, record.ranges, 2))
    close_ring(name)
    return record.ranges, out.detach(), *heads_of(dpart, grad)


def heads_of(fused: Tensor, grad: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, grad.shape[1::2]).transpose(1, 2) for part in fused.chunk(3, dim=-1)]


def joined(gloo: Any, degrees: Degrees, layout: Any, *arguments: Any) -> list[Tensor]:
    results = gloo(degrees.context * degrees.head).run(ring, degrees, layout, *arguments)
    held = [result[0] for result in results]
    return [gather_shards([result[index] for result in results], held, 2) for index in range(1, 5)]


def by_hand(fused: Tensor, grad: Tensor, scale: float, causal: bool = True) -> list[Tensor]:
    leaves = [part.detach().requires_grad_() for part in heads_of(fused.double(), grad)]
    out, _ = attention_oracle(*leaves, scale=scale, mask=dense_mask(fused.shape[1], causal=causal))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("degrees", [Degrees(1, 3), Degrees(1, 4), Degrees(1, 4, 2), HYBRID])
def test_backward_between_processes(gloo: Any, degrees: Degrees, layout: str, backend: str) -> None:
    """B43: non-contiguous views, scaled logits, a random gradient; float64 to 1e-10, every element."""
    generator = torch.Generator().manual_seed(1)
    for heads in (2, 12 // degrees.context):  # the second: as many heads as tokens on a ring rank
        fused = torch.randn(1, 12, 3 * heads * 8, generator=generator, dtype=torch.float64)
        grad = torch.randn(1, heads, 12, 8, generator=generator, dtype=torch.float64)
        found = joined(gloo, degrees, layout, fused, grad, 1.5, backend)
        for name, actual, expected in zip(NAMES, found, by_hand(fused, grad, 1.5), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit", [-20000.0, -65000.0])
@pytest.mark.parametrize(("layout", "length"), [("contiguous", 2), ("contiguous", 4), ("zigzag", 8), ("striped", 8)])
def test_no_mask_beats_a_low_logit(
    gloo: Any, layout: str, length: int, logit: float, dtype: torch.dtype, backend: str
) -> None:
    """B41: every allowed key has the same very low logit and value 1; keys that come later would score 0, value 100."""
    looked_at = torch.eye(length)  # of every row of the batch another query
    allowed = torch.ones(length, length).tril()
    fused = torch.stack([logit * looked_at, allowed, 100.0 - 99.0 * allowed], dim=-1).to(dtype)
    grad = looked_at[:, None, :, None].to(dtype)
    out, _, _, dvalue = joined(gloo, Degrees(1, 2), layout, fused, grad, 1.0, backend)
    for last in range(length):
        assert out[last, 0, last, 0] == 1.0
        assert (dvalue[last, 0, last + 1 :] == 0).all(), "a masked key weighs exactly nothing"
        equal = torch.full((last + 1,), 1 / (last + 1))
        # Backward only has lse, which float32 rounds to 0.002 at 20000 and to 0.004 at 65000.
        torch.testing.assert_close(dvalue[last, 0, : last + 1, 0].float(), equal, rtol=4e-3 + 2**-8, atol=0)


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_bfloat16_sums_are_kept_wide_between_processes(gloo: Any, backend: str) -> None:
    """B42: over 4 processes the error is that of rounding the result once, for dk and dv that travel home too."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(1, 128, 3 * 2 * 16, generator=generator).to(torch.bfloat16)
    grad = torch.randn(1, 2, 128, 16, generator=generator).to(torch.bfloat16)
    expected = by_hand(fused, grad, 0.25)

    def errors(degrees: Degrees) -> list[float]:
        found = joined(gloo, degrees, "zigzag", fused, grad, 0.25, backend)
        return [(a.double() - e).square().mean().sqrt().item() for a, e in zip(found, expected, strict=True)]

    two, four, hybrid = errors(Degrees(1, 2)), errors(Degrees(1, 4)), errors(HYBRID)
    rounding = [(e.to(torch.bfloat16).double() - e).square().mean().sqrt().item() for e in expected]
    assert max(two[0], four[0], hybrid[0]) <= 1.5 * rounding[0]
    assert all(many <= 1.15 * few for many, few in zip(four, two, strict=True))
    assert all(many <= 1.15 * few for many, few in zip(hybrid, two, strict=True))
