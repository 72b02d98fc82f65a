"""Online softmax: combine attention over parts of the keys (Milakov & Gimelshein, arXiv 1805.02867), and sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from lightning_longctx.attention.spans import batched, in_a_row
from lightning_longctx.attention.written import Written
from lightning_longctx.plan.stacks import Span


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of accumulators: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RunningSoftmax:
    """Attention over the keys seen so far: ``out`` [B, Hq, T, D] and ``lse`` [B, Hq, T], both wide.

    A row that has seen no key has out 0 and lse -inf. Memory is token-major, as projections and the CPU kernel like it.
    """

    def __init__(self, query: Tensor, width: int) -> None:
        self._query = query
        self._width = width
        self._written = Written(query.shape[2])
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, span: Span, out: Tensor, lse: Tensor) -> None:
        """Merge a partial result for some rows; takes ownership of it.

        Args:
            span: Which rows.
            out: [B * count, Hq, size, D].
            lse: [B * count, Hq, size].
        """
        dtype, tokens = wide_dtype(self._query.dtype), self._query.shape[2]
        parts = self._written.mark(span)
        if self._out is None and span.is_all_of(tokens):
            # The first result that covers all rows needs no merge, only a home.
            whole = (out, lse) if span.count == 1 else (in_a_row(out), in_a_row(lse))
            self._out, self._lse = whole[0].to(dtype), whole[1].to(dtype).contiguous()
            return
        out_sum, lse_sum = self._sums()
        for index, count, first, last, fresh in parts:
            rows = span.part(index, count, first, last)
            new_out, new_lse = (x[index : index + count] if span.count > 1 else x for x in (out, lse))
            new_out, new_lse = new_out[:, :, first:last], new_lse[:, :, first:last]
            if fresh:
                batched(out_sum, rows).copy_(new_out)
                batched(lse_sum, rows).copy_(new_lse)
            else:
                merge_(batched(out_sum, rows), batched(lse_sum, rows), new_out.to(dtype), new_lse.to(dtype))

    def result(self) -> tuple[Tensor, Tensor]:
        """``(out, lse)``; lse is contiguous."""
        out, lse = self._sums()
        for first, last in self._written.gaps():
            out[:, :, first:last].zero_()
            lse[:, :, first:last].fill_(float("-inf"))
        return out, lse

    def _sums(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            batch, heads, tokens, _ = self._query.shape
            options = {"dtype": wide_dtype(self._query.dtype), "device": self._query.device}
            self._out = torch.empty((batch, tokens, heads, self._width), **options).transpose(1, 2)
            self._lse = torch.empty((batch, heads, tokens), **options)
        return self._out, self._lse


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """In place: ``lse' = logaddexp(lse, new_lse)``, ``out' = out + sigmoid(new_lse - lse) * (new_out - out)``.

    The sigmoid form cannot overflow however far apart the two are. Two rows that saw no key stay at 0 and -inf.
    """
    if out.dtype == torch.float32 and (fused := _fused(out.device.type)) is not None:
        fused(out, lse, new_out, new_lse)
        return
    weight = (new_lse - lse).sigmoid_()
    weight.masked_fill_(new_lse == float("-inf"), 0.0)  # -inf - -inf is NaN, but there is nothing to add
    out.lerp_(new_out, weight.unsqueeze(-1))
    torch.logaddexp(lse, new_lse, out=lse)


@lru_cache
def _fused(device: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    """Our kernel for the same, one pass over memory instead of six, where Triton is there for it."""
    if device != "cuda" or find_spec("triton") is None:
        return None
    return import_module("lightning_longctx.kernels.merge").merge_


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One more logit per head, of a key whose value is zero (Xiao et al., arXiv 2309.17453; learned as in gpt-oss).

    ``out' = out * sigmoid(lse - sink)``, ``lse' = logaddexp(lse, sink)``: no backend needs to know, and backward with
    the new out and lse is right for queries, keys and values.

    Args:
        out: [B, H, T, D], wide; overwritten.
        lse: [B, H, T], wide.
        sinks: [H].
    """
    sinks = sinks.to(lse.dtype)[:, None]
    return out.mul_((lse - sinks).sigmoid().unsqueeze(-1)), torch.logaddexp(lse, sinks)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``-sum over rows of exp(sink - lse) * rowsum(grad * out)``, with the final out and lse; [H], in sinks' dtype."""
    wide = wide_dtype(out.dtype)
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weights * (grad.to(wide) * out.to(wide)).sum(-1)).sum((0, 2)).to(sinks.dtype)
