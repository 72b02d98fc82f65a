"""Other options about checkpoints, the Trainer's and its callbacks': made to fit how they are written, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_longctx._upstream import METADATA_FILENAME, is_sharded_checkpoint
from lightning_longctx.models.atomic import holds_working_directory
from lightning_longctx.strategy.checkpoints.saving import Saves


def check_target(path: Any, storage_options: Any) -> None:
    """Check where a checkpoint is to be written.

    Raises:
        ValueError: It is not a path of a file system, or there are options for another storage.
    """
    if "://" in str(path) or storage_options is not None:
        raise ValueError(
            f"save_checkpoint({str(path)!r}, storage_options={storage_options!r}): LongContextStrategy writes to "
            "mounted file systems only, because a checkpoint must appear in one step. Give a local path, and upload "
            "what is there then."
        )


def why_kept(path: Path) -> str | None:
    """What is at a path, if that must stay: a checkpoint takes the place of a file or another checkpoint only.

    Returns:
        For a message; None if a checkpoint may be written there.
    """
    try:
        if holds_working_directory(path):
            return "the working directory, or around it"
        if not path.exists() or path.is_file() or is_sharded_checkpoint(path):
            return None
        if not path.is_dir():
            return "no regular file"
        return f"a directory without {METADATA_FILENAME}, and not empty" if any(path.iterdir()) else None
    except OSError as problem:
        return f"not to be looked into ({problem.strerror})"


def check_kept(path: Path, kept: str | None) -> None:
    """Refuse a path that must stay as it is.

    Args:
        path: Where the checkpoint was to be written.
        kept: What ``why_kept`` says on rank 0.

    Raises:
        ValueError: There is something that no checkpoint may take the place of.
    """
    if kept is not None:
        raise ValueError(
            f"save_checkpoint({str(path)!r}): what is there is no checkpoint, but {kept}. It would be replaced, with "
            f"all that is in it. Give the path that the checkpoint itself is to have, such as {path / 'last.ckpt'}."
        )


def check_callbacks(trainer: Trainer, saves: Saves, checkpoint_io: object) -> None:
    """Fit a Trainer's other options about checkpoints to how they are written.

    Raises:
        ValueError: They cannot be.
    """
    if type(checkpoint_io) is not TorchCheckpointIO:
        raise ValueError(
            f"plugins=[{type(checkpoint_io).__name__}()] would not be used: LongContextStrategy writes checkpoints "
            "itself. Leave it out; to train on while one is written, use async_checkpoint=True."
        )
    for callback in trainer.checkpoint_callbacks if saves.in_background else ():
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.save_last == "link":
            raise ValueError(
                "async_checkpoint=True with ModelCheckpoint(save_last='link'): the link would be there before the "
                "checkpoint. Use save_last=True."
            )
        callback.file_exists = _once_whole(callback, saves)  # type: ignore[method-assign]


def _once_whole(callback: ModelCheckpoint, saves: Saves) -> Callable[[Any, Trainer], bool]:
    """``file_exists`` that waits for a save in the background: its name is taken, though nothing is there yet."""

    def file_exists(filepath: Any, trainer: Trainer) -> bool:
        saves.finish()
        return type(callback).file_exists(callback, filepath, trainer)

    return file_exists
