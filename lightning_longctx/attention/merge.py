"""Online softmax: combine attention over parts of the keys (Milakov & Gimelshein, arXiv 1805.02867)."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of accumulators: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RunningSoftmax:
    """Attention over the keys seen so far: ``out`` [B, Hq, T, D] and ``lse`` [B, Hq, T], both wide.

    A row that has seen no key has out 0 and lse -inf.
    """

    def __init__(self, query: Tensor, width: int) -> None:
        self._shape = (*query.shape[:3], width)
        self._dtype = wide_dtype(query.dtype)
        self._device = query.device
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, start: int, stop: int, out: Tensor, lse: Tensor) -> None:
        """Merge a partial result for the rows ``start:stop``; takes ownership of ``out`` and ``lse``."""
        out, lse = out.to(self._dtype), lse.to(self._dtype)
        if self._out is None or self._lse is None:
            if (start, stop) == (0, self._shape[2]):
                # The first result that covers all rows needs no merge, only a home.
                self._out, self._lse = out.contiguous(), lse.contiguous()
                return
            self._out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
            self._lse = torch.full(self._shape[:3], float("-inf"), dtype=self._dtype, device=self._device)
        merge_(self._out[:, :, start:stop], self._lse[:, :, start:stop], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """``(out, lse)``, both contiguous."""
        if self._out is None or self._lse is None:
            out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
            return out, torch.full(self._shape[:3], float("-inf"), dtype=self._dtype, device=self._device)
        return self._out, self._lse


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """In place: ``lse' = logaddexp(lse, new_lse)``, ``out' = out + sigmoid(new_lse - lse) * (new_out - out)``.

    The sigmoid form cannot overflow however far apart the two are. Two rows that saw no key stay at 0 and -inf.
    """
    weight = (new_lse - lse).sigmoid_()
    weight.masked_fill_(new_lse == float("-inf"), 0.0)  # -inf - -inf is NaN, but there is nothing to add
    out.lerp_(new_out, weight.unsqueeze(-1))
    torch.logaddexp(lse, new_lse, out=lse)
