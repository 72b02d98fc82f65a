"""Metrics of torchmetrics: whose states are summed up, where several ranks see the same tokens."""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric


def share_metrics(module: nn.Module, group: ProcessGroup) -> list[Metric]:
    """Let the metrics of a module synchronise over ``group``, but for those that have a group of their own.

    Args:
        module: Its attributes, and those of its parts, are looked through; not lists and dicts of metrics.
        group: The ranks that hold different tokens.

    Returns:
        The metrics that were changed, for ``release_metrics``.
    """
    metrics = [part for part in module.modules() if isinstance(part, Metric) and part.process_group is None]
    for metric in metrics:
        metric.process_group = group
    return metrics


def release_metrics(metrics: list[Metric]) -> None:
    """Take the group away again: a metric that has one can be neither copied nor pickled."""
    for metric in metrics:
        metric.process_group = None
