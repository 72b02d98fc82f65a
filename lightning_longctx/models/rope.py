"""Rotary positions (RoFormer, arXiv 2104.09864), in the half-split form of Llama checkpoints.

Nothing here is a module: a buffer of frequencies would be rounded by ``model.bfloat16()`` and lost by initialisation
on the meta device, while computing them anew costs ``head_width / 2`` powers a step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_frequencies(head_width: int, base: float, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Radians by which each pair turns per position: ``base ** (-2 i / head_width)``, shape [head_width / 2]."""
    exponents = torch.arange(0, head_width, 2, device=device).to(dtype) / head_width
    return 1.0 / base**exponents


def rotary_angles(
    position_ids: Tensor, head_width: int, base: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's angles.

    Args:
        position_ids: Global positions [B, T], int64. A shard passes its own positions, never ``arange(T)``.
        head_width: Width of one head.
        base: Base of the frequencies.
        dtype: float32, or float64 for float64 models. Angles are computed in it even under autocast.

    Returns:
        Two tensors [B, 1, T, head_width / 2]: one for all heads.
    """
    with torch.autocast(position_ids.device.type, enabled=False):
        frequencies = rotary_frequencies(head_width, base, device=position_ids.device, dtype=dtype)
        angles = position_ids[:, None, :, None].to(dtype) * frequencies
        return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn pair ``(x[i], x[i + D/2])`` of every head by its token's angle.

    Args:
        heads: Queries or keys [B, H, T, D] in any floating dtype.
        cosine: [B, 1, T, D / 2], float32 or float64.
        sine: As ``cosine``.

    Returns:
        As ``heads``, computed in the dtype of ``cosine`` and cast back once.
    """
    first, second = heads.to(cosine.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(heads.dtype)
