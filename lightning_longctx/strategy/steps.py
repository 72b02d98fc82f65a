"""What must hold around a step: degrees that exist, batches that say how they were cut, attention that looks afar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_longctx.attention import intercepted
from lightning_longctx.attention.attend import calls_made
from lightning_longctx.strategy.contents import BatchContents
from lightning_longctx.topology import Degrees


def check_degrees(degrees: Degrees) -> None:
    """Refuse axes that cannot have more than one rank yet.

    Raises:
        ValueError: One of them has.
    """
    for option in ("head", "tensor"):
        if (degree := getattr(degrees, option)) != 1:
            raise ValueError(f"{option}={degree} is not available yet: use {option}=1.")


@contextmanager
def whole_attention(contents: BatchContents, context: int, step: str) -> Iterator[None]:
    """Inside, attention calls see whole sequences.

    Args:
        contents: Of the step's batch.
        context: Context ranks.
        step: Name of the step, for errors.

    Raises:
        ValueError: Sequences are spread over ranks, but the batch does not say how, or a training step never called
            attention in a way that could be noticed: it has mixed tokens within this rank's shard at most.
    """
    if context > 1 and not contents.records:
        raise ValueError(
            f"context={context}, but the batch of {step} has no `sequence` entry, so it was not cut over the ranks. "
            "Take `batch` (not dataloader_iter), let the loader yield dicts with input_ids [B, S], and keep `sequence` "
            "in hooks that rebuild the batch."
        )
    before = calls_made()
    with intercepted(contents.records):
        yield
    if context > 1 and step == "training_step" and calls_made() == before:
        raise ValueError(
            f"context={context}, but {step} made no attention call that could be noticed, so no token has seen another "
            "rank's. Use F.scaled_dot_product_attention(..., is_causal=True) or lightning_longctx.attend."
        )
