"""The slow twin: attention as the formula, in the wide dtype, for any band."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_longctx.attention.backends.contract import Dropout, Needs, Scores, Tiles
from lightning_longctx.attention.backends.dropping import keeps
from lightning_longctx.attention.merge import wide_dtype
from lightning_longctx.plan.stacks import Span
from lightning_longctx.plan.tiles import Tile

_MOST_SCORES = 2**24
"""Scores in memory at once, which blocks of queries keep to."""


class Reference:
    """``softmax(softcap(scale * q k^T) + band)``, some of it dropped, times ``v``; a block of queries at a time."""

    name = "reference"
    takes_tables = False

    def refusal(self, needs: Needs) -> str | None:
        """It computes everything."""
        return None if needs.dtype.is_floating_point else f"{needs.dtype} is not a floating-point dtype"

    def parts(self, tile: Tile, device: torch.device, dtype: torch.dtype, *, backward: bool = False) -> Tiles:
        """Any band as it is."""
        return (tile,)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scores: Scores) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        outs, lses = [], []
        for rows, tile, block in _blocks(query, key, tiles, scores):
            logits = _logits(_grouped(query[:, :, rows], key), key, tile, block).masked
            lse = logits.logsumexp(-1)
            # Not exp(logits - lse): where logits are large, rounding lse would leave weights that do not add up to 1.
            weights = logits.softmax(-1).masked_fill((lse == float("-inf")).unsqueeze(-1), 0.0)
            outs.append((_dropped(weights, block.dropout) @ _wide(value).unsqueeze(2)).flatten(1, 2))
            lses.append(lse.flatten(1, 2))
        return torch.cat(outs, dim=2).to(query.dtype), torch.cat(lses, dim=2)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Backend.backward``; with p the weights: ds = p * (dropped(dout v^T) - rowsum(dout * out))."""
        dqueries = []
        dkey, dvalue = (torch.zeros_like(tensor, dtype=wide_dtype(tensor.dtype)) for tensor in (key, value))
        for rows, tile, block in _blocks(query, key, tiles, scores):
            grouped, dout, outs = (_grouped(tensor[:, :, rows], key) for tensor in (query, grad, out))
            logits = _logits(grouped, key, tile, block)
            weights = _weights(logits.masked, lse[:, :, rows].reshape(grouped.shape[:-1]))
            dweights = _dropped(dout @ _wide(value).unsqueeze(2).transpose(-1, -2), block.dropout)
            dlogits = weights * (dweights - (dout * outs).sum(-1, keepdim=True)) * logits.slope * block.scale
            dqueries.append((dlogits @ _wide(key).unsqueeze(2)).flatten(1, 2))
            dkey += (dlogits.transpose(-1, -2) @ grouped).sum(2)
            dvalue += (_dropped(weights, block.dropout).transpose(-1, -2) @ dout).sum(2)
        return torch.cat(dqueries, dim=2).to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


class _Logits(NamedTuple):
    """Logits with -inf where nothing is seen, and by how much a logit grows with its score."""

    masked: Tensor
    slope: Tensor | float


def _blocks(query: Tensor, key: Tensor, tiles: Tiles, scores: Scores) -> Iterator[tuple[slice, Tile, Scores]]:
    """Blocks of queries, the tile that each is, and its scores."""
    (tile,) = tiles
    size = max(1, _MOST_SCORES // max(1, query.shape[0] * query.shape[1] * tile.num_keys))
    keys = Span(0, tile.num_keys, 1, 0)
    for start in range(0, max(1, tile.num_queries), size):
        stop = min(start + size, tile.num_queries)
        # A query further down is one key further on.
        block = Tile(0, stop - start, 0, tile.num_keys, tile.lo + start, tile.hi + start)
        yield slice(start, stop), block, scores.part(Span(start, stop - start, 1, 0), keys)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


def _grouped(tensor: Tensor, key: Tensor) -> Tensor:
    """[B, Hq, T, D] -> [B, Hkv, Hq / Hkv, T, D]."""
    batch, heads, tokens, width = tensor.shape
    return _wide(tensor).reshape(batch, key.shape[1], heads // key.shape[1], tokens, width)


def _logits(grouped: Tensor, key: Tensor, tile: Tile, scores: Scores) -> _Logits:
    logits, slope = scores.scale * grouped @ _wide(key).unsqueeze(2).transpose(-1, -2), 1.0
    if scores.softcap is not None:
        bent = (logits / scores.softcap).tanh()
        logits, slope = scores.softcap * bent, 1.0 - bent**2
    rows = torch.arange(tile.num_queries, device=key.device).unsqueeze(1)
    offset = torch.arange(tile.num_keys, device=key.device) - rows
    return _Logits(logits.masked_fill((offset <= tile.lo) | (offset > tile.hi), float("-inf")), slope)


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    # A row that sees nothing has lse -inf; exp(-inf - inf) = 0 is what it should weigh, exp(-inf + inf) would be NaN.
    return (logits - lse.masked_fill(lse == float("-inf"), float("inf")).unsqueeze(-1)).exp()


def _dropped(weights: Tensor, dropout: Dropout | None) -> Tensor:
    """Weights [B, Hkv, Hq / Hkv, Tq, Tk] with some set to 0, and the others made up for it."""
    if dropout is None:
        return weights
    return weights.masked_fill(~keeps(dropout).view(weights.shape), 0.0) / (1.0 - dropout.p)
