"""What a backend promises: one tile of attention, forward and backward."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_longctx.plan.tiles import Tile


class Backend(Protocol):
    """Computes one tile: queries [B, Hq, Tq, D], keys and values [B, Hkv, Tk, D]; Hkv divides Hq (grouped heads)."""

    name: str

    def refusal(self, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
        """Why this backend cannot compute heads of ``width`` in ``dtype`` on ``device``; None if it can."""
        ...

    def parts(
        self, tile: Tile, device: torch.device, dtype: torch.dtype, *, backward: bool = False
    ) -> tuple[Tile, ...]:
        """Cut a tile into such as this backend computes, and computes fast, in a forward or a backward pass.

        Raises:
            ValueError: It cannot compute the tile's band.
        """
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        """Softmax over the tile's keys alone.

        Returns:
            out [B, Hq, Tq, D] in the inputs' dtype, and lse [B, Hq, Tq], the log of the sum of exponentials, in the
            wide dtype (see ``merge.wide_dtype``). A row that sees no key has out 0 and lse -inf.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this tile, given the *final* out and lse of its queries over all keys.

        Returns:
            dq, dk and dv with the shapes of query, key and value.
        """
        ...
