"""Next-token labels of whole sequences. Runs before a batch is cut, so a shard's last token has its true label."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100
"""Label that counts nowhere: the default ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""


def shift_labels(labels: Tensor, starts: Tensor | None = None, ignore: int = IGNORE) -> Tensor:
    """Move labels one place left, so that the label at a position is the token after it.

    Args:
        labels: [B, S] tokens; ``ignore`` where nothing is to be predicted.
        starts: [B, S] booleans, true at the first token of a document: no token predicts it.
        ignore: Label for the last token of a row or document, which has no next one.

    Returns:
        [B, S] of the same dtype.
    """
    following = labels if starts is None else labels.masked_fill(starts, ignore)
    return torch.cat([following[:, 1:], torch.full_like(labels[:, :1], ignore)], dim=1)


def count_valid(labels: Tensor, ignore: int = IGNORE) -> int:
    """Number of (already shifted) labels that count towards the loss."""
    return int((labels != ignore).sum())
