"""What Lightning has left to do when a checkpoint is made, for the last batch or epoch, and the metrics for that."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_longctx import _upstream
from lightning_longctx.strategy.samples.progress import Place


def unfinished(trainer: Trainer, place: Place) -> dict[str, Any]:
    """Plain values and scalar tensors for a checkpoint; on every rank, since metrics may have to be reduced.

    Args:
        trainer: That trains, validates, or has just done so.
        place: Of the checkpoint.
    """
    _, batches = _upstream.train_counters(trainer)
    metrics = {name: value.detach().cpu().clone() for name, value in trainer.callback_metrics.items()}
    return {
        "validation": batches.current.processed == place.batch and _upstream.validation_is_due(trainer),
        "plateaus": _upstream.plateaus_are_due(trainer),
        "metrics": metrics,
        "means": _upstream.epoch_means(trainer) if place.batch > 0 else [],
    }


def restore_metrics(trainer: Trainer, left: dict[str, Any]) -> None:
    """Let callbacks and schedulers that watch a metric find the last value that it had."""
    device = trainer.strategy.root_device
    _upstream.set_callback_metrics(trainer, {name: value.to(device) for name, value in left["metrics"].items()})


def take_plateau_steps(trainer: Trainer, left: dict[str, Any], place: Place) -> None:
    """Make up for the step of ``ReduceLROnPlateau`` at the end of the epoch; where it cannot be the same, say so.

    Args:
        trainer: After ``continue_epoch``.
        left: From ``unfinished``.
        place: Where this run goes on.
    """
    monitors = _upstream.plateau_monitors(trainer)
    if place.batch > 0 and not place.ended:
        if means := [name for name in monitors if name in left["means"]]:
            _warn(means[0], place.epoch, "in full: its next step goes by the mean over the batches from here on")
        return
    to_come = place.ended and left["validation"]
    unknown = [name for name in monitors if name in left["means"] or not (to_come or name in left["metrics"])]
    if place.ended and unknown:
        _upstream.skip_plateaus(trainer)
        _warn(unknown[0], place.epoch, "yet: it takes no step for that epoch")
    elif left["plateaus"] and unknown:
        _warn(unknown[0], place.epoch - 1, "yet: it takes no step for that epoch")
    elif left["plateaus"]:
        _upstream.step_plateaus(trainer)


def _warn(monitor: str, epoch: int, consequence: str) -> None:
    rank_zero_warn(
        f"ReduceLROnPlateau monitors {monitor!r}, and the checkpoint does not have the value of epoch {epoch} "
        f"{consequence}. Save in on_train_epoch_end, after the metric was logged, or monitor one of validation."
    )
