"""Attention over whole sequences in one process, which every way over ranks is held to."""

from itertools import pairwise

import torch

from lightning_longctx.plan.mask import CAUSAL
from lightning_longctx.testing.oracle import attention_oracle, dense_mask
from lightning_longctx.testing.tolerances import assert_close_relative

NAMES = ("out", "dq", "dk", "dv", "dsinks")


def inputs(length, dtype, heads=4, kv_heads=2, batch=1, width=8, scale=1.0, seed=0):
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, length, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype) for shape in shapes]


def sinks_of(heads, dtype=torch.float64):
    return torch.linspace(-2.0, 2.0, heads, dtype=torch.float64).to(dtype)


def dense(length, mask=CAUSAL, documents=(), num_rows=1):
    """[num_rows, 1, length, length]; ``documents`` as in ``SequenceRecord``."""
    lengths = [stop - start for start, stop in pairwise(documents)] or [length] * num_rows
    whole = dense_mask(num_rows * length, mask.causal, mask.window, lengths)
    rows = [whole[start : start + length, start : start + length] for start in range(0, num_rows * length, length)]
    return torch.stack(rows).unsqueeze(1)


def oracle(query, key, value, grad, mask=None, sinks=None, scale=None, **extra):
    """Out, dq, dk, dv and, with sinks, dsinks in float64; ``mask`` is dense, None is causal; the rest as there."""
    leaves = [
        tensor.double().detach().requires_grad_() for tensor in (query, key, value, *([] if sinks is None else [sinks]))
    ]
    out, _ = attention_oracle(*leaves[:3], mask=mask, sinks=None if sinks is None else leaves[3], scale=scale, **extra)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def check(result, expected, tolerance, case=""):
    """Compare everything there is; ``tolerance`` is one number, or one for values and one for gradients."""
    values, gradients = tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance)
    for index, (actual, right) in enumerate(zip(result, expected, strict=False)):
        assert_close_relative(actual, right, f"{case} {NAMES[index]}", gradients if index else values)


def rms_errors(result, expected):
    return [(a.double() - e).square().mean().sqrt().item() for a, e in zip(result, expected, strict=False)]


def join(results):
    """Whole tensors from every rank's ``(record, tensors, ...)``: tokens to their places, what is left summed."""
    records, parts = [result[0] for result in results], [result[1] for result in results]
    whole = [_placed(records, tensors) for tensors in list(zip(*parts, strict=True))[:4]]
    return [*whole, *(sum(tensors) for tensors in list(zip(*parts, strict=True))[4:])]


def _placed(records, parts):
    batch, heads, _, width = parts[0].shape
    whole = torch.full((batch, heads, records[0].length, width), float("nan"), dtype=parts[0].dtype)
    for record, part in zip(records, parts, strict=True):
        rows = record.row_ranges
        for row in range(batch):
            held = [position for piece in rows[row % len(rows)] for position in piece]
            whole[row, :, held] = part[row]
    return whole
