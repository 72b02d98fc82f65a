"""What one training step takes: time, memory, bytes sent and attention run, over all ranks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_longctx.attention.op import rings_run
from lightning_longctx.cli.bench.bare_loop import sent_bytes
from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.memory.choice.live_bytes import LiveBytes, live_bytes
from lightning_longctx.memory.resident import peak_bytes, reset_peak, resident_bytes


@dataclass(frozen=True)
class Step:
    """One step over all ranks.

    Args:
        seconds: Of the slowest rank.
        growth: Bytes by which memory rose above what was there before, on the rank where it did so most: the resident
            set of the process, or on CUDA what tensors occupy.
        allocated: The same in bytes of tensors; None if the step was not traced.
        sent: Bytes sent in attention, by rank.
        rings: Forward passes of ring attention, of the rank with most.
    """

    seconds: float
    growth: int
    allocated: int | None
    sent: tuple[int, ...]
    rings: int


class Meter:
    """Measures steps on one rank; all ranks must begin and end each step together.

    Args:
        module: The rank's, distributed.
        device: That it trains on.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._trace: LiveBytes | None = None
        self._start, self._resident, self._sent, self._rings = 0.0, 0, 0, 0

    def begin(self, batch: Any, trace: bool = False) -> None:
        """Give freed memory back and note what there is, then wait for the others.

        Args:
            batch: Of the step.
            trace: Find out ``Step.allocated``, too. The tracer's own memory counts in ``Step.growth``.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._resident = torch.cuda.memory_allocated(self._device)
        elif reset_peak():
            self._resident = resident_bytes()
        else:
            raise WrongResultError(
                "this system does not say how much memory a process held at most: Linux does, unless a container "
                "forbids to write /proc/self/clear_refs."
            )
        self._sent, self._rings = sent_bytes(batch), rings_run()
        if trace and self._device.type == "cpu":
            self._trace = live_bytes(self._device, self._module)
            self._trace.start()
        dist.barrier()
        self._start = time.perf_counter()

    def before_backward(self) -> None:
        """The gradients of the step before are gone now."""
        if self._trace is not None:
            self._trace.mark()

    def end(self, batch: Any, loss: Any) -> Step:
        """The figures of the step.

        Args:
            batch: As given to ``begin``.
            loss: This rank's.

        Raises:
            WrongResultError: The loss of some rank is not finite; on every rank.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds, allocated = time.perf_counter() - self._start, None
        if self._device.type == "cuda":
            growth = allocated = torch.cuda.max_memory_allocated(self._device) - self._resident
        else:
            growth = max(0, peak_bytes() - self._resident)
        if self._trace is not None:
            allocated, self._trace = max(stretch.peak for stretch in self._trace.stop()), None
        mine = (seconds, growth, allocated, sent_bytes(batch) - self._sent, rings_run() - self._rings, float(loss))
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if not all(math.isfinite(rank[5]) for rank in ranks):
            raise WrongResultError(f"losses by rank are {[rank[5] for rank in ranks]}: the recipe does not train.")
        return Step(
            seconds=max(rank[0] for rank in ranks),
            growth=max(rank[1] for rank in ranks),
            allocated=None if allocated is None else max(rank[2] for rank in ranks),
            sent=tuple(rank[3] for rank in ranks),
            rings=max(rank[4] for rank in ranks),
        )
