"""Sums over tiles in the wide dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx.attention.merge import wide_dtype
from lightning_longctx.attention.spans import batched, in_a_row
from lightning_longctx.attention.written import Written
from lightning_longctx.plan.stacks import Span


class TokenSum:
    """Sum of parts that each cover some tokens of a [B, H, T, D] tensor.

    Args:
        like: Gives shape, device and, widened, the dtype.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._dtype = wide_dtype(like.dtype)
        self._written = Written(like.shape[2])
        self._sum: Tensor | None = None

    def add(self, span: Span, part: Tensor) -> None:
        """Add ``part`` [B * count, H, size, D] to the tokens of ``span``; takes ownership of it."""
        parts = self._written.mark(span)
        if self._sum is None and span.is_all_of(self._like.shape[2]):
            # The first part that covers all tokens becomes the sum.
            self._sum = (part if span.count == 1 else in_a_row(part)).to(self._dtype)
            return
        total = self._memory()
        for index, count, first, last, fresh in parts:
            into = batched(total, span.part(index, count, first, last))
            added = (part[index : index + count] if span.count > 1 else part)[:, :, first:last]
            if fresh:
                into.copy_(added)
            else:
                into.add_(added)

    def total(self) -> Tensor:
        """The sum so far: [B, H, T, D], zero where nothing was added."""
        total = self._memory()
        for first, last in self._written.gaps():
            total[:, :, first:last].zero_()
            self._written.mark(Span(first, last - first, 1, 0))
        return total

    def _memory(self) -> Tensor:
        if self._sum is None:
            batch, heads, tokens, width = self._like.shape
            shape = (batch, tokens, heads, width)
            self._sum = torch.empty(shape, dtype=self._dtype, device=self._like.device).transpose(1, 2)
        return self._sum
