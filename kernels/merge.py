"""Merge two partial results of attention in place, in one launch.

``lse' = log(exp(lse) + exp(new_lse))``, ``out' = out + w * (new_out - out)`` with ``w = 1 / (1 + exp(lse - new_lse))``
(Milakov & Gimelshein, arXiv 1805.02867): nothing overflows however far apart the two are. A pass over ``out`` instead
of the six that single operations make.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lightning_longctx.kernels.blocks import padded_width
from lightning_longctx.kernels.jit import check_device, interpreting, jit
from lightning_longctx.kernels.scores import rows_of, store_rows
from lightning_longctx.kernels.strided import Strided, strided

_ROWS = 32


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge a partial result into another. Two rows that saw no key stay at 0 and -inf.

    Args:
        out: [B, H, T, D], any strides but a dense last dim; overwritten.
        lse: [B, H, T], any strides; overwritten.
        new_out: As out, in any floating-point dtype.
        new_lse: As lse.

    Raises:
        ValueError: Shapes differ, ``out`` has a last dim that is not dense, or the tensors are on no GPU.
    """
    check_device(out)
    if new_out.shape != out.shape or not lse.shape == new_lse.shape == out.shape[:3]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (out, lse, new_out, new_lse))
        raise ValueError(f"out, lse, new_out and new_lse of shapes {shapes} don't fit: [B, H, T, D] and [B, H, T].")
    if out.stride(3) != 1 and out.shape[3] > 1:
        raise ValueError(f"out with strides {out.stride()} can't be merged in place: its last dim must be dense.")
    batch, heads, tokens, width = out.shape
    rows = 16 if interpreting() else _ROWS
    programs = -(-tokens // rows) * batch * heads
    arguments = (
        Strided(out, *out.stride()[:3]),
        Strided(lse, *lse.stride()),
        strided(new_out),
        Strided(new_lse, *new_lse.stride()),
        *(tokens, heads, batch * heads),
    )
    constants = {"WIDTH": width, "PADDED": padded_width(width), "ROWS": rows, "num_warps": 4, "enable_fp_fusion": True}
    if programs:
        with torch.cuda.device_of(out):  # Triton launches on the current device, whatever it is given
            merge_rows[(programs,)](*arguments, **constants)


@jit
def _log_pointers(lse, batch, head, index):
    return lse.memory + (batch.to(tl.int64) * lse.batch + head.to(tl.int64) * lse.head + index.to(tl.int64) * lse.token)


@jit(do_not_specialize=["num_tokens"])
def merge_rows(
    out,
    lse,
    new_out,
    new_lse,
    num_tokens,
    num_heads,
    lanes,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One block of rows of one head."""
    lane = tl.program_id(0) % lanes
    batch, head = lane // num_heads, lane % num_heads
    index = (tl.program_id(0) // lanes) * ROWS + tl.arange(0, ROWS)
    present = index < num_tokens
    where = _log_pointers(lse, batch, head, index)
    ours = tl.load(where, mask=present, other=float("-inf"))
    theirs = tl.load(_log_pointers(new_lse, batch, head, index), mask=present, other=float("-inf")).to(ours.dtype)
    # Rows without new keys keep what they have: -inf - -inf is NaN, and their new_out need not be a number.
    nothing = theirs == float("-inf")
    weight = 1.0 / (1.0 + tl.exp(tl.where(nothing, 0.0, ours - theirs)))
    old = rows_of(out, batch, head, index, present, WIDTH, PADDED)
    new = rows_of(new_out, batch, head, index, present, WIDTH, PADDED).to(old.dtype)
    step = weight[:, None] * (new - old)
    # As Tensor.lerp: exact at both ends.
    merged = tl.where(weight[:, None] < 0.5, old + step, new - (1.0 - weight[:, None]) * (new - old))
    store_rows(out, batch, head, index, present & ~nothing, merged, WIDTH, PADDED)
    high, low = tl.maximum(ours, theirs), tl.minimum(ours, theirs)
    gap = tl.where(nothing, float("-inf"), low - high)
    tl.store(where, tl.where(nothing, ours, high + tl.log(1.0 + tl.exp(gap))), mask=present)
