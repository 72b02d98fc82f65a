"""PyTorch's own flash attention, called below autograd: it returns lse, and its backward takes the final one."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_longctx import _upstream
from lightning_longctx.attention.backends.contract import Needs, Scores, Tiles
from lightning_longctx.plan.cuts import (
    causal_parts,
    halved,
    is_causal_square,
    is_late_square,
    late_halved,
    narrowed,
    window_parts,
)
from lightning_longctx.plan.tiles import Tile

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_WIDTH, _CUDA_WIDTH_STEP = 256, 8
_CPU_SQUARE, _CPU_KEYS, _CPU_BAND = 128, 1024, 256


class Aten:
    """``aten::_scaled_dot_product_flash_attention``, on CPU near the speed of a matrix product.

    Tiles are full, square causal, or (on CPU) narrow bands with a bias; none has a row without a key, for which the CPU
    op would return lse 0, not -inf.
    """

    name = "aten"
    takes_tables = False

    def refusal(self, needs: Needs) -> str | None:
        """See ``Backend.refusal``."""
        device, dtype = needs.device, needs.dtype
        if needs.softcap or needs.dropout:
            return "PyTorch's flash attention knows no " + ("softcap" if needs.softcap else "dropout by position")
        if device.type not in ("cpu", "cuda"):
            return f"no flash attention for device type {device.type}"
        if dtype not in (_CPU_DTYPES if device.type == "cpu" else _CUDA_DTYPES):
            return f"no {dtype} on {device.type}"
        if device.type == "cuda" and (needs.width > _CUDA_WIDTH or needs.width % _CUDA_WIDTH_STEP):
            return f"head width {needs.width} is not a multiple of {_CUDA_WIDTH_STEP} up to {_CUDA_WIDTH}"
        if device.type == "cuda" and needs.window:
            return "no windows on cuda"
        return None

    def parts(self, tile: Tile, device: torch.device, dtype: torch.dtype, *, backward: bool = False) -> Tiles:
        """Full and square causal tiles; on CPU small squares, because the op computes 512 keys at a time along them.

        Measured (8 heads of 64, float32, forward + backward): a causal square of 8,192 takes 3.40 s whole and 3.20 s
        with squares of 128. Full tiles go in columns of 1,024 keys, whose gradients stay in the cache: 2 ranks at
        16,384 tokens take 6.75 s without and 6.37 s with them. In bfloat16 small squares are slower: 1,024 tokens
        61 ms whole, 83 ms.
        """
        if device.type != "cpu":
            return causal_parts(tile)
        parts = causal_parts(tile) if tile.lo <= -tile.num_queries else window_parts(tile, _CPU_BAND)
        if dtype not in (torch.float32, torch.float64):
            return parts
        leaves = tuple(leaf for part in parts for leaf in _leaves(part))
        return tuple(column for leaf in leaves for column in narrowed(leaf, _CPU_KEYS)) if backward else leaves

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scores: Scores) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        (tile,), scale = tiles, scores.scale
        if query.device.type == "cpu":
            causal, bias = _cpu_mask(tile, query.dtype)
            return _upstream.flash_attention_cpu(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
        causal = not tile.is_full
        return _upstream.flash_attention_cuda(query, *_repeated(query, key, value), 0.0, causal, scale=scale)[:2]

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
        """See ``Backend.backward``."""
        (tile,), scale = tiles, scores.scale
        if query.device.type == "cpu":
            causal, bias = _cpu_mask(tile, query.dtype)
            flash = _upstream.flash_attention_cpu_backward
            return flash(grad, query, key, value, out, lse.contiguous(), 0.0, causal, attn_mask=bias, scale=scale)
        flash = _upstream.flash_attention_cuda_backward
        wide_key, wide_value = _repeated(query, key, value)
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        sizes = (None, None, query.shape[2], key.shape[2])
        causal = not tile.is_full
        grads = flash(
            grad, query, wide_key, wide_value, out, lse.contiguous(), *sizes, 0.0, causal, seed, seed, scale=scale
        )
        return grads[0], _folded(grads[1], key), _folded(grads[2], value)


def _leaves(part: Tile) -> tuple[Tile, ...]:
    return late_halved(part, _CPU_SQUARE) if is_late_square(part) else halved(part, _CPU_SQUARE)


def _cpu_mask(tile: Tile, dtype: torch.dtype) -> tuple[bool, Tensor | None]:
    """``(is_causal, bias)`` for a tile."""
    if tile.is_full:
        return False, None
    if is_causal_square(tile):
        return True, None
    return False, _bias(tile.num_queries, tile.num_keys, tile.lo, tile.hi, dtype)


@lru_cache(maxsize=64)
def _bias(num_queries: int, num_keys: int, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
    """0 in the band, -inf elsewhere; the op wants it in the inputs' dtype."""
    offset = torch.arange(num_keys) - torch.arange(num_queries).unsqueeze(1)
    bias = torch.zeros(num_queries, num_keys, dtype=dtype)
    return bias.masked_fill_((offset <= lo) | (offset > hi), float("-inf"))


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The CUDA op wants as many key/value heads as query heads."""
    group = query.shape[1] // key.shape[1]
    return key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)


def _folded(grad: Tensor, like: Tensor) -> Tensor:
    """Backward of ``_repeated``: sum over the copies of a head."""
    batch, heads, tokens, width = like.shape
    return grad.reshape(batch, heads, -1, tokens, width).sum(2)
