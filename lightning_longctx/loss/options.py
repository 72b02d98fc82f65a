"""How the output matrix and its loss are computed: what a user may choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_longctx.loss.cross_entropy import token_cross_entropy
from lightning_longctx.loss.liger import check_liger, liger_cross_entropy
from lightning_longctx.loss.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class TiledLoss:
    """The output matrix and the cross entropy of its logits, a tile of tokens at a time: whole logits never exist.

    Args:
        tile_tokens: Tokens of a tile. ``auto`` takes as many as have 64 MiB of logits (see
            ``loss.linear_cross_entropy.auto_tile_tokens``); the numbers do not depend on it. ``null`` makes all logits
            at once, by the model's own call.
        kernel: ``torch``, for any device and with tensor ranks; or ``liger``, the Triton kernels of the package
            liger-kernel, on CUDA and with tensor=1. They choose their tiles themselves.

    Raises:
        ValueError: An option is out of range, or conflicts with another.
    """

    tile_tokens: int | Literal["auto"] | None = "auto"
    kernel: Literal["torch", "liger"] = "torch"

    def __post_init__(self) -> None:
        tokens = self.tile_tokens
        if tokens not in ("auto", None) and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise ValueError(f"loss.tile_tokens={tokens!r} must be a number of tokens, at least 1, or auto, or null.")
        if self.kernel not in ("torch", "liger"):
            raise ValueError(f"loss.kernel={self.kernel!r} must be torch or liger.")
        if self.kernel == "liger" and tokens != "auto":
            raise ValueError(
                f"loss.tile_tokens={'null' if tokens is None else tokens} conflicts with loss.kernel=liger, which "
                "chooses its tiles itself. Leave tile_tokens out, or use kernel=torch."
            )

    @property
    def is_tiled(self) -> bool:
        """Whether there are tiles at all."""
        return self.tile_tokens is not None

    def check(self, device: torch.device, num_tensor_ranks: int) -> None:
        """Raise ``ValueError`` if the kernel cannot run on a device, or with that many tensor ranks."""
        if self.kernel == "liger":
            check_liger(device, num_tensor_ranks)

    def check_whole(self, model: str) -> None:
        """Raise ``ValueError`` if logits may not be computed whole, as those of ``model`` have to be."""
        if self.kernel == "liger":
            raise ValueError(
                f"loss.kernel=liger needs logits that are a plain product with a matrix, and those of {model} are not. "
                "Use loss.kernel=torch."
            )

    def __call__(
        self, states: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sum of losses and number of labels that count; arguments as of ``linear_cross_entropy``.

        Raises:
            ValueError: The kernel cannot do it: on this device, without a package, or with tensor ranks.
        """
        if self.kernel == "liger":
            return liger_cross_entropy(states, weight, labels, bias=bias)
        if self.tile_tokens is None:
            return token_cross_entropy(F.linear(states, weight, bias), labels)
        tokens = None if self.tile_tokens == "auto" else self.tile_tokens
        return linear_cross_entropy(states, weight, labels, bias=bias, tile_tokens=tokens)
