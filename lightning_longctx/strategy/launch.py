"""Is the number of processes right? Asked before anything is launched or communicates, by every process."""

from __future__ import annotations

import os

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment


def check_launch(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Check that the launcher started as many processes as the Trainer expects.

    Lightning itself asks only where it launches processes: under torchrun, other counts run on unnoticed.

    Args:
        environment: Knows the processes that exist.
        num_devices: ``Trainer(devices=...)``, resolved.
        num_nodes: ``Trainer(num_nodes=...)``.

    Raises:
        ValueError: It did not; the message names the options.
    """
    expected = num_devices * num_nodes
    if not environment.creates_processes_externally:
        return
    started = started_processes(environment)
    if (started is not None and started != expected) or environment.local_rank() >= num_devices:
        raise ValueError(
            f"trainer.devices={num_devices} x trainer.num_nodes={num_nodes} = {expected}, but "
            f"{type(environment).__name__} runs {'more' if started is None else started} processes. Start {expected}, "
            "or set trainer.devices to the processes of one node (devices=auto is 1 on CPU)."
        )
    environment.validate_settings(num_devices=num_devices, num_nodes=num_nodes)


def started_processes(environment: ClusterEnvironment) -> int | None:
    """Processes of the run, as far as the launcher has told; Lightning's own environment only repeats the Trainer."""
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return None
