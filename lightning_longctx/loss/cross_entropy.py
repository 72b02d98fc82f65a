"""Cross entropy as a sum over tokens, and how many there were."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longctx.batch import IGNORE
from lightning_longctx.loss.vocabulary import split_cross_entropy


def token_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy summed over the labels that count.

    Args:
        logits: [..., V]; computed in float32, or in float64 if they are. A DTensor cut over the vocabulary stays cut.
        labels: [...] int64, already shifted: the token that each position predicts, -100 where nothing counts.

    Returns:
        The sum, which is 0 but still in the graph if no label counts, and the int64 number of labels that count.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide, flat = wide.flatten(0, -2), labels.flatten()
    if isinstance(wide, DTensor) and all(placement.is_replicate() for placement in wide.placements):
        wide = wide.to_local()
    if isinstance(wide, DTensor):
        total = split_cross_entropy(wide, flat)
    else:
        total = F.cross_entropy(wide, flat, ignore_index=IGNORE, reduction="sum")
    return total, (labels != IGNORE).sum()
