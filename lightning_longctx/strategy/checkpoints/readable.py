"""Checkpoints that cannot be read: what torch raises depends on the bytes that it finds, and seldom names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp


@contextmanager
def readable(path: Path, objects: str = "") -> Iterator[None]:
    """Say which checkpoint it is that torch cannot read, and why.

    Args:
        path: Of the checkpoint.
        objects: What to do about a file that holds more than plain values, where that can be chosen.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        yield
    except (Exception, dcp.CheckpointException) as problem:
        reason = _reason(problem)
        advice = objects if objects and "Unsupported global" in reason else _WHOLE
        raise ValueError(f"{path} cannot be read ({reason}). {advice}") from problem


def _reason(problem: BaseException) -> str:
    """The part of torch's report that is about the file, as one sentence."""
    if isinstance(problem, dcp.CheckpointException):
        problem = next(iter(problem.failures.values()))[0]
    if isinstance(problem, EOFError):
        return "the file is empty or ends too early"
    text = str(problem)
    text = text.partition("WeightsUnpickler error:")[2] or text  # before it: how to load without weights_only
    sentence = " ".join(text.partition("Check the documentation")[0].split()).partition(". ")[0]
    return f"{type(problem).__name__}: {sentence.rstrip('.')}" if sentence else type(problem).__name__


_WHOLE = "Give a checkpoint that Lightning saved, whole: if it was copied, copy it anew."
