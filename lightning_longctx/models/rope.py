"""Rotary positions (RoFormer, arXiv 2104.09864), in the half-split form of Llama checkpoints.

Nothing here is a module: a buffer of frequencies would be rounded by ``model.bfloat16()`` and lost by initialisation
on the meta device, while computing them anew costs ``head_width / 2`` powers a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_longctx.models.rope_scaling import RopeScaling, scaled_frequencies, stretched_base


def rotary_frequencies(
    head_width: int,
    base: float,
    *,
    device: torch.device,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
    length: int = 0,
) -> Tensor:
    """Radians by which each pair turns per position: ``base ** (-2 i / head_width)``, shape [head_width / 2].

    Args:
        head_width: Width of one head.
        base: Base of the frequencies.
        device: Where to compute them.
        dtype: float32 or float64.
        scaling: How they are scaled, if at all.
        length: Length of the whole sequence in tokens, never of a shard; only ``dynamic`` scaling looks at it.
    """
    if scaling is not None and scaling.depends_on_length:
        base, scaling = stretched_base(scaling, base, head_width, length), None
    powers = base ** (torch.arange(0, head_width, 2, device=device).to(dtype) / head_width)
    return 1.0 / powers if scaling is None else scaled_frequencies(powers, scaling, base)


def rotary_angles(
    position_ids: Tensor,
    head_width: int,
    base: float,
    dtype: torch.dtype = torch.float32,
    scaling: RopeScaling | None = None,
    row_lengths: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's angles, times the scaling's ``attention_scale``.

    Args:
        position_ids: Global positions [B, T], int64. A shard passes its own positions, never ``arange(T)``.
        head_width: Width of one head.
        base: Base of the frequencies.
        dtype: float32, or float64 for float64 models. Angles are computed in it even under autocast.
        scaling: How frequencies are scaled, if at all.
        row_lengths: Length of every whole row, or one for all: ``row_lengths`` of the batch's ``sequence`` record.
            Without them (only ``dynamic`` scaling needs any) ``position_ids`` are taken to be whole rows.

    Returns:
        Two tensors [B, 1, T, head_width / 2]: one for all heads.

    Raises:
        ValueError: ``row_lengths`` are neither one nor B.
    """

    def frequencies(length: int = 0) -> Tensor:
        device = position_ids.device
        return rotary_frequencies(head_width, base, device=device, dtype=dtype, scaling=scaling, length=length)

    with torch.autocast(position_ids.device.type, enabled=False):
        if scaling is None or not scaling.depends_on_length:
            turns = frequencies()
        else:
            lengths = row_lengths or (position_ids.amax(dim=1) + 1).tolist()
            if len(lengths) not in (1, len(position_ids)):
                raise ValueError(
                    f"row_lengths of {len(lengths)} rows do not fit position_ids of {len(position_ids)}. If you take "
                    "rows out of a batch, take them out of its record: replace(sequence, row_lengths=...)."
                )
            turns = torch.stack([frequencies(length) for length in lengths])[:, None, None]
        angles = position_ids[:, None, :, None].to(dtype) * turns
        if scaling is None or scaling.attention_scale == 1:
            return angles.cos(), angles.sin()
        return angles.cos() * scaling.attention_scale, angles.sin() * scaling.attention_scale


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
