"""Sums over tiles in the wide dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx.attention.merge import wide_dtype


class TokenSum:
    """Sum of parts that each cover some tokens of a [B, H, T, D] tensor.

    Args:
        like: Gives shape, device and, widened, the dtype.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._dtype = wide_dtype(like.dtype)
        self._total: Tensor | None = None

    def add(self, start: int, stop: int, part: Tensor) -> None:
        """Add ``part`` to the tokens ``start:stop``; takes ownership of it."""
        if self._total is None and (start, stop) == (0, self._like.shape[2]):
            # The first part that covers all tokens becomes the sum: no pass over memory to clear it, none to add.
            self._total = part.to(self._dtype)
        else:
            self.total[:, :, start:stop].add_(part)

    @property
    def total(self) -> Tensor:
        """The sum so far: [B, H, T, D], zero where nothing was added."""
        if self._total is None:
            self._total = torch.zeros(self._like.shape, dtype=self._dtype, device=self._like.device)
        return self._total
