"""Peak memory of the ranks: the largest, which must fit, and the smallest, which shows the imbalance."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_longctx._upstream import is_last_of_window, writes_metrics

GIB = 2**30


class PeakMemory(Callback):
    """Log ``peak_memory_gib_max`` and ``peak_memory_gib_min`` over the ranks, since the start of the process.

    On CUDA, the memory that tensors occupied, and besides it what the allocator had reserved
    (``peak_reserved_gib_max``, ``peak_reserved_gib_min``). Elsewhere, the process's resident set.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_last_of_window(trainer) and writes_metrics(trainer):
            largest, smallest = max_and_min(torch.tensor(peaks(pl_module.device), device=pl_module.device))
            for name, high, low in zip(("memory", "reserved"), largest, smallest, strict=False):
                values = {f"peak_{name}_gib_max": high, f"peak_{name}_gib_min": low}
                pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)


def peaks(device: torch.device) -> list[float]:
    """This process's peaks in GiB: of tensors and of the allocator on CUDA, else of the resident set."""
    if device.type == "cuda":
        return [torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB]
    unit = 1 if sys.platform == "darwin" else 1024  # the kernels count it in bytes and in KiB
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB]


def max_and_min(values: torch.Tensor) -> tuple[list[float], list[float]]:
    """Element-wise largest and smallest over all ranks, with one all-reduce."""
    both = torch.stack([values, -values])
    if dist.is_initialized():
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both[0].tolist(), (-both[1]).tolist()
