"""Launchers: banded attention over a tile table, forward and backward, on tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from lightning_longctx.kernels.attention_backward import attention_dkdv, attention_dq
from lightning_longctx.kernels.attention_forward import attention_forward
from lightning_longctx.kernels.blocks import INTERPRETED, Blocks, Pass, blocks_for, padded_width
from lightning_longctx.kernels.jit import check_device, interpreting
from lightning_longctx.kernels.strided import strided, token_major
from lightning_longctx.kernels.tiles import Table, schedule_on


class Drops(NamedTuple):
    """Attention dropout: weight (row, key) stays iff ``mix(mix(key ^ a) ^ b) >= threshold`` in 32-bit words.

    Args:
        p: Probability; weights that stay are divided by ``1 - p``.
        threshold: ``round(p * 2^32)``, below 2^32.
        rows: [B, Hq, Tq, 2] int64, the words a and b of every query row, below 2^32.
        keys: [Tk] int64, below 2^32.
    """

    p: float
    threshold: int
    rows: Tensor
    keys: Tensor


class Weighing(NamedTuple):
    """How products of queries and keys become weights.

    Args:
        scale: Factor on them.
        softcap: Scores become ``softcap * tanh(score / softcap)``; None leaves them.
        drops: None drops nothing.
    """

    scale: float
    softcap: float | None = None
    drops: Drops | None = None


def forward(query: Tensor, key: Tensor, value: Tensor, table: Table, weighing: Weighing) -> tuple[Tensor, Tensor]:
    """Attention of queries over the keys that tiles show them; one launch (formula: ``attention_forward``).

    Args:
        query: [B, Hq, Tq, D] of bfloat16, float16 or float32 (float64 in the interpreter), D up to 256.
        key: [B, Hkv, Tk, D]; Hkv divides Hq.
        value: [B, Hkv, Tk, D].
        table: Tiles ``(q_start, q_stop, k_start, k_stop, lo, hi)``, of which no two show the same pair.
        weighing: Scale, softcap and dropout.

    Returns:
        out [B, Hq, Tq, D] in the inputs' dtype, token-major in memory, and lse [B, Hq, Tq] in float32 (float64 for
        float64), to base e and before dropout. A query that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: Shapes, devices or tiles that don't fit.
    """
    launch = _Launch("forward", query, key, value, table, weighing)
    out = token_major(query, query.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=launch.wide)
    operands = [strided(tensor) for tensor in (query, key, value, out)]
    launch(attention_forward, query.shape[0] * query.shape[1], *operands, lse)
    return out, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Table,
    weighing: Weighing,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``forward`` for these tiles; two launches (formula: ``attention_backward``).

    Args:
        grad: Of out, [B, Hq, Tq, D].
        query: As in forward.
        key: As in forward.
        value: As in forward.
        out: [B, Hq, Tq, D], the final one, over all keys of the softmax, those of other tables among them.
        lse: [B, Hq, Tq], likewise.
        table: As in forward.
        weighing: As in forward.

    Returns:
        dq, dk and dv in the inputs' dtype; 0 where nothing is seen.
    """
    launch = _Launch("dq", query, key, value, table, weighing)
    lse, delta = lse.contiguous(), query.new_empty(query.shape[:3], dtype=launch.wide)
    dquery, dkey, dvalue = (token_major(tensor, tensor.shape[3]) for tensor in (query, key, value))
    inputs = [strided(tensor) for tensor in (query, key, value, grad)]
    launch(attention_dq, query.shape[0] * query.shape[1], *inputs, strided(out), lse, delta, strided(dquery))
    launch = _Launch("dkdv", query, key, value, table, weighing)
    outputs = (strided(dkey), strided(dvalue))
    launch(attention_dkdv, key.shape[0] * key.shape[1], *inputs, lse, delta, *outputs, num_keys=key.shape[2])
    return dquery, dkey, dvalue


class _Launch:
    """The arguments that the three kernels share, and one launch."""

    def __init__(
        self, which: Pass, query: Tensor, key: Tensor, value: Tensor, table: Table, weighing: Weighing
    ) -> None:
        _check(query, key, value)
        double = query.dtype == torch.float64
        self.wide = torch.float64 if double else torch.float32
        width = query.shape[3]
        blocks = INTERPRETED if interpreting() else blocks_for(which, width, query.dtype)
        sizes = (query.shape[2], key.shape[2])
        self._plan = schedule_on(query.device, table, sizes, blocks[:2], which == "dkdv")
        drops = weighing.drops
        self._arguments: dict[str, Any] = {
            "rows": strided(drops.rows) if drops else None,
            "positions": drops.keys.contiguous() if drops else None,
            "plan": self._plan,
            "num_queries": sizes[0],
            "num_heads": query.shape[1],
            "group": query.shape[1] // key.shape[1],
            "scale": weighing.scale,
            "softcap": weighing.softcap or 0.0,
            "keep_scale": 1.0 / (1.0 - drops.p) if drops else 1.0,
            "WIDTH": width,
            "PADDED": padded_width(width),
            "SOFTCAP": weighing.softcap is not None,
            "THRESHOLD": drops.threshold if drops else 0,
            "WIDE": tl.float64 if double else tl.float32,
            **compiled(blocks),
        }

    def __call__(self, kernel: Any, lanes: int, *operands: Any, **sizes: int) -> None:
        """``lanes``: heads times rows of the batch."""
        programs = len(self._plan.order) * lanes
        if programs:
            with torch.cuda.device_of(self._plan.order):  # Triton launches on the current device, whatever it is given
                kernel[(programs,)](*operands, lanes=lanes, **sizes, **self._arguments)


def compiled(blocks: Blocks) -> dict[str, int | bool]:
    """The arguments that Triton compiles a kernel for some blocks with."""
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages, "enable_fp_fusion": True}
    return {"M": blocks.queries, "N": blocks.keys, **options}


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    check_device(query)
    batch, heads, _, width = query.shape
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != width or heads % key.shape[1]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(
            f"query, key and value of shapes {shapes} don't fit: [B, Hq, Tq, D] and twice [B, Hkv, Tk, D]."
        )
