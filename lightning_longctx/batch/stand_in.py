"""Batches that take part in a step, because all ranks must, and count nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from lightning_longctx.batch.labels import IGNORE


def is_labelled(batch: Any) -> bool:
    """Whether a cut batch has labels, so that it can be made to count nowhere."""
    return isinstance(batch, Mapping) and "shift_labels" in batch and "sequence" in batch


def without_labels(batch: Any) -> Any:
    """A cut batch with the same tokens, of which none counts.

    Args:
        batch: Of ``shard_batch``, labelled; it is left as it is.

    Returns:
        The same entries, but ``shift_labels`` of -100 and a ``sequence`` record with ``num_valid_tokens`` 0.
    """
    result = copy(batch)
    result["shift_labels"] = torch.full_like(batch["shift_labels"], IGNORE)
    result["sequence"] = replace(batch["sequence"], num_valid_tokens=0)
    return result
