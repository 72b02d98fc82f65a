"""Cross entropy as a sum over tokens, and how many there were."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_longctx.batch import IGNORE


def token_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy summed over the labels that count.

    Args:
        logits: [..., V]; computed in float32, or in float64 if they are.
        labels: [...] int64, already shifted: the token that each position predicts, -100 where nothing counts.

    Returns:
        The sum, which is 0 but still in the graph if no label counts, and the int64 number of labels that count.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, (labels != IGNORE).sum()
