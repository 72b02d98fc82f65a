"""The slow twin: attention as the formula, in the wide dtype, for any band."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx.attention.merge import wide_dtype
from lightning_longctx.plan.tiles import Tile


class Reference:
    """``softmax(scale * q k^T + band) v`` with every score in memory."""

    name = "reference"

    def refusal(self, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
        """It computes everything."""
        return None if dtype.is_floating_point else f"{dtype} is not a floating-point dtype"

    def parts(
        self, tile: Tile, device: torch.device, dtype: torch.dtype, *, backward: bool = False
    ) -> tuple[Tile, ...]:
        """Any band as it is."""
        return (tile,)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        scores = _scores(_grouped(query, key), key, tile, scale)
        lse = scores.logsumexp(-1)
        # Not exp(scores - lse): where scores are large, rounding lse would leave weights that do not add up to 1.
        weights = scores.softmax(-1).masked_fill((lse == float("-inf")).unsqueeze(-1), 0.0)
        out = weights @ _wide(value).unsqueeze(2)
        return out.reshape(*query.shape[:3], value.shape[-1]).to(query.dtype), lse.reshape(query.shape[:3])

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
        """See ``Backend.backward``; with p the weights: ds = p * (dout v^T - rowsum(dout * out))."""
        grouped, dout = _grouped(query, key), _grouped(grad, key)
        weights = _weights(_scores(grouped, key, tile, scale), lse.reshape(grouped.shape[:-1]))
        delta = (dout * _grouped(out, key)).sum(-1, keepdim=True)
        dscores = weights * (dout @ _wide(value).unsqueeze(2).transpose(-1, -2) - delta) * scale
        dquery = dscores @ _wide(key).unsqueeze(2)
        dkey = (dscores.transpose(-1, -2) @ grouped).sum(2)
        dvalue = (weights.transpose(-1, -2) @ dout).sum(2)
        return dquery.reshape(query.shape).to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


def _grouped(tensor: Tensor, key: Tensor) -> Tensor:
    """[B, Hq, T, D] -> [B, Hkv, Hq / Hkv, T, D]."""
    batch, heads, tokens, width = tensor.shape
    return _wide(tensor).reshape(batch, key.shape[1], heads // key.shape[1], tokens, width)


def _scores(grouped: Tensor, key: Tensor, tile: Tile, scale: float) -> Tensor:
    scores = scale * grouped @ _wide(key).unsqueeze(2).transpose(-1, -2)
    rows = torch.arange(tile.num_queries, device=key.device).unsqueeze(1)
    offset = torch.arange(tile.num_keys, device=key.device) - rows
    return scores.masked_fill((offset <= tile.lo) | (offset > tile.hi), float("-inf"))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    # A row that sees nothing has lse -inf; exp(-inf - inf) = 0 is what it should weigh, exp(-inf + inf) would be NaN.
    return (scores - lse.masked_fill(lse == float("-inf"), float("inf")).unsqueeze(-1)).exp()
