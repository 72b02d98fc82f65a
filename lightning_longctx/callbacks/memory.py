"""Peak memory of the ranks: the largest, which must fit, the smallest, which shows the imbalance, and where it was."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_longctx._upstream import is_last_of_window, logged_steps, writes_metrics
from lightning_longctx.callbacks.peak_region import AFTER, OPTIMIZER, PeakRegion
from lightning_longctx.memory.policy import GIB
from lightning_longctx.memory.resident import knows_peak, peak_bytes

_MOST_REGIONS = 1 << 16


class PeakMemory(Callback):
    """Log ``peak_memory_gib_max`` and ``peak_memory_gib_min`` over the ranks, since the start of the process.

    On CUDA, the memory that tensors occupied, and besides it what the allocator had reserved
    (``peak_reserved_gib_max``, ``peak_reserved_gib_min``). Elsewhere, the process's resident set.

    ``peak_memory_region``, a text, says in which part of a training step the rank with the largest peak reached it:
    ``forward of NAME`` or ``backward of NAME`` (what is run again there included) for each repeated block, ``loss``
    (head and loss, both ways), ``forward`` or ``backward`` for the rest of the module, ``after backward``, ``optimizer
    step``, or ``outside of training steps``. It is written again when it changes, by loggers that take texts, such as
    TensorBoard. Blocks within ``torch.compile`` are not told apart.

    Finding it reads the counter once per block, forward and backward: 0.04 ms each on CPU, and about as much on CUDA
    (not measured).
    """

    def __init__(self) -> None:
        self._region: PeakRegion | None = None
        self._shown = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch."""
        self._stop()
        device, self._shown = pl_module.device, ""
        self._region = PeakRegion(pl_module, lambda: peaks_in_bytes(device)[0])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._watched.begin_step()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._watched.begin_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watched.enter(AFTER)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._watched.enter(OPTIMIZER)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._watched.end_step()
        if is_last_of_window(trainer) and writes_metrics(trainer):
            found = [*peaks(pl_module.device), encoded(peaks_in_bytes(pl_module.device)[0], self._place())]
            values = torch.tensor(found, dtype=torch.float64, device=pl_module.device)
            largest, smallest = max_and_min(values)
            for name, high, low in zip(("memory", "reserved"), largest[:-1], smallest[:-1], strict=False):
                logged = {f"peak_{name}_gib_max": high, f"peak_{name}_gib_min": low}
                pl_module.log_dict(logged, on_step=True, on_epoch=False, batch_size=1)
            self._show(trainer, self._watched.names[decoded(largest[-1])], largest[0])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Likewise."""
        self._stop()

    @property
    def region(self) -> str:
        """Where the largest peak of all ranks was when it was last logged; empty before."""
        return self._shown

    @property
    def _watched(self) -> PeakRegion:
        assert self._region is not None
        return self._region

    def _place(self) -> int:
        return self._watched.names.index(self._watched.found)

    def _stop(self) -> None:
        if self._region is not None:
            self._region.remove()
            self._region = None

    def _show(self, trainer: Trainer, region: str, gib: float) -> None:
        if region == self._shown:
            return
        self._shown = region
        for logger in trainer.loggers:
            write = getattr(getattr(logger, "experiment", None), "add_text", None)
            if write is not None:
                write("peak_memory_region", f"{region}: {gib:.3f} GiB", logged_steps(trainer) - 1)


def peaks(device: torch.device) -> list[float]:
    """This process's peaks in GiB: of tensors and of the allocator on CUDA, else of the resident set."""
    return [count / GIB for count in peaks_in_bytes(device)]


def peaks_in_bytes(device: torch.device) -> list[int]:
    """The same in bytes."""
    if device.type == "cuda":
        return [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    if sys.platform == "linux" and knows_peak():
        return [peak_bytes()]  # of this process alone: ru_maxrss begins with that of the one it was launched from
    unit = 1 if sys.platform == "darwin" else 1024  # the kernels count it in bytes and in KiB
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]


def encoded(num_bytes: int, region: int) -> float:
    """A peak and its region as one number, of which the largest is that of the largest peak; exact in float64."""
    return float(num_bytes // 1024 * _MOST_REGIONS + region)


def decoded(value: float) -> int:
    """The region of such a number."""
    return int(value) % _MOST_REGIONS


def max_and_min(values: torch.Tensor) -> tuple[list[float], list[float]]:
    """Element-wise largest and smallest over all ranks, with one all-reduce."""
    both = torch.stack([values, -values])
    if dist.is_initialized():
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both[0].tolist(), (-both[1]).tolist()
