"""PyTorch's own flash attention, called below autograd: it returns lse, and its backward takes the final one."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx import _upstream
from lightning_longctx.plan.tiles import Tile, causal_parts, halved, narrowed

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_WIDTH = 256
_CPU_SQUARE, _CPU_KEYS = 128, 1024


class Aten:
    """``aten::_scaled_dot_product_flash_attention``, on CPU near the speed of a matrix product.

    Tiles are full or square causal, so no row is without a key: the CPU op would return lse 0 for one, not -inf.
    """

    name = "aten"

    def refusal(self, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
        """See ``Backend.refusal``."""
        if device.type not in ("cpu", "cuda"):
            return f"no flash attention for device type {device.type}"
        if dtype not in (_CPU_DTYPES if device.type == "cpu" else _CUDA_DTYPES):
            return f"no {dtype} on {device.type}"
        if device.type == "cuda" and width > _CUDA_WIDTH:
            return f"head width {width} is over {_CUDA_WIDTH}"
        return None

    def parts(self, tile: Tile, device: torch.device, dtype: torch.dtype) -> tuple[Tile, ...]:
        """Full and square causal tiles; on CPU small squares, because the op computes 512 keys at a time along them.

        Measured (8 heads of 64, float32, forward + backward): a causal square of 8,192 takes 3.40 s whole and 3.20 s
        with squares of 128. Full tiles go in columns of 1,024 keys, whose gradients stay in the cache: 2 ranks at
        16,384 tokens take 6.75 s without and 6.37 s with them. In bfloat16 small squares are slower: 1,024 tokens
        61 ms whole, 83 ms.
        """
        parts = causal_parts(tile)
        if device.type == "cpu" and dtype in (torch.float32, torch.float64):
            leaves = [leaf for part in parts for leaf in halved(part, _CPU_SQUARE)]
            return tuple(column for leaf in leaves for column in narrowed(leaf, _CPU_KEYS))
        return parts

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        causal = not tile.is_full
        if query.device.type == "cpu":
            return _upstream.flash_attention_cpu(query, key, value, 0.0, causal, scale=scale)
        return _upstream.flash_attention_cuda(query, *_repeated(query, key, value), 0.0, causal, scale=scale)[:2]

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
        """See ``Backend.backward``."""
        causal = not tile.is_full
        if query.device.type == "cpu":
            flash = _upstream.flash_attention_cpu_backward
            return flash(grad, query, key, value, out, lse.contiguous(), 0.0, causal, scale=scale)
        flash = _upstream.flash_attention_cuda_backward
        wide_key, wide_value = _repeated(query, key, value)
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        sizes = (None, None, query.shape[2], key.shape[2])
        grads = flash(
            grad, query, wide_key, wide_value, out, lse.contiguous(), *sizes, 0.0, causal, seed, seed, scale=scale
        )
        return grads[0], _folded(grads[1], key), _folded(grads[2], value)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The CUDA op wants as many key/value heads as query heads."""
    group = query.shape[1] // key.shape[1]
    return key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)


def _folded(grad: Tensor, like: Tensor) -> Tensor:
    """Backward of ``_repeated``: sum over the copies of a head."""
    batch, heads, tokens, width = like.shape
    return grad.reshape(batch, heads, -1, tokens, width).sum(2)
