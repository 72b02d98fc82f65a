"""How many bytes of tensors are there, and how many there were at most, between marks in a step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_longctx._upstream import local_part, profiler_is_on

PROFILED = (
    "checkpointing.policy=auto measures memory with torch.profiler, which is running already on some rank. Leave "
    "trainer.profiler out, or begin it after three steps."
)
_MARK = "longctx::mark"
_MEMORY = "[memory]"
_LEVEL = "KINETO_LOG_LEVEL"


class Stretch(NamedTuple):
    """What was there between two marks, in bytes beyond what was there at the start.

    Args:
        start: At the first mark.
        end: At the second one.
        peak: At most in between.
    """

    start: int
    end: int
    peak: int


class LiveBytes(Protocol):
    """Counts from ``start`` on."""

    def start(self) -> None:
        """Begin; this is the first mark."""
        ...

    def mark(self) -> None:
        """A stretch ends and the next one begins."""
        ...

    def stop(self) -> list[Stretch]:
        """The stretches between marks, and the last one until now."""
        ...


def live_bytes(device: torch.device, module: nn.Module) -> LiveBytes:
    """What counts on a device.

    Args:
        device: Of the tensors.
        module: Whose gradients may be there already, and be freed meanwhile.

    Raises:
        ValueError: Nothing counts on such a device, or someone else is counting.
    """
    if device.type == "cuda":
        return _DeviceCounters(device)
    if device.type == "cpu":
        return _HostEvents(module)
    raise ValueError(f"checkpointing.policy=auto measures memory on CPU and CUDA, not on {device.type}.")


class _DeviceCounters:
    """The counters of PyTorch's CUDA allocator; their peak begins anew at every mark."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stretches: list[Stretch] = []
        self._base = self._last = 0

    def start(self) -> None:
        self._stretches.clear()
        self._base = torch.cuda.memory_allocated(self._device)
        self._last = 0
        torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self) -> None:
        now = torch.cuda.memory_allocated(self._device) - self._base
        peak = torch.cuda.max_memory_allocated(self._device) - self._base
        self._stretches.append(Stretch(self._last, now, peak))
        self._last = now
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> list[Stretch]:
        self.mark()
        return self._stretches


class _HostEvents:
    """Every allocation on CPU, as PyTorch's profiler notes it: also of temporaries inside of operations.

    It hears of this thread alone, and knows nothing of what was there before it began, so that gradients of the last
    step, which are freed in this one, are looked after here.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._freed: list[int] = []
        self._before: list[tuple[list[ref[Tensor]], int]] = []

    def start(self) -> None:
        if profiler_is_on():
            raise ValueError(PROFILED)
        gradients = [weight.grad for weight in self._module.parameters() if weight.grad is not None]
        self._freed = []
        storages: dict[int, tuple[list[ref[Tensor]], int]] = {}
        for gradient in gradients:  # those of one FSDP2 group share their memory
            storage = local_part(gradient).untyped_storage()
            storages.setdefault(storage.data_ptr(), ([], storage.nbytes()))[0].append(ref(gradient))
        self._before = list(storages.values())
        gradients = gradient = storage = None  # nothing of them is held on to
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _silent():
            self._profile.__enter__()
        self.mark()

    def mark(self) -> None:
        self._freed.append(sum(size for sharing, size in self._before if all(one() is None for one in sharing)))
        with record_function(_MARK):
            pass

    def stop(self) -> list[Stretch]:
        with _silent():
            self._profile.__exit__(None, None, None)
        events: list[Any] = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        moved = ((one.start_ns(), one.nbytes() if one.name() == _MEMORY else None) for one in events if _counts(one))
        return stretches(sorted(moved, key=lambda pair: pair[0]), self._freed)


def stretches(events: Iterable[tuple[int, int | None]], freed: list[int]) -> list[Stretch]:
    """Add up allocations between marks.

    Args:
        events: In order: when, and how many bytes came (or went); None is a mark. What is before the first one counts
            as there at the start.
        freed: At every mark, how much was freed until then of which no event tells.
    """
    live = base = 0
    found: list[Stretch] = []
    start = peak = 0
    marks = -1
    for _, size in events:
        if size is not None:
            live += size
            peak = max(peak, live)
            continue
        marks += 1
        if marks == 0:
            base = live
        else:
            found.append(_stretch(start, live, peak, base, freed, marks))
        start = peak = live
    found.append(_stretch(start, live, peak, base, freed, marks + 1))
    return found


def _stretch(start: int, end: int, peak: int, base: int, freed: list[int], number: int) -> Stretch:
    before, after = freed[number - 1], freed[min(number, len(freed) - 1)]
    return Stretch(start - base - before, end - base - after, peak - base - before)


def _counts(event: Any) -> bool:
    return event.name() in (_MEMORY, _MARK)


@contextmanager
def _silent() -> Iterator[None]:
    """Kineto prints a line whenever it starts and stops, at any level that it knows."""
    before = os.environ.get(_LEVEL)
    os.environ.setdefault(_LEVEL, "99")
    yield
    if before is None:
        del os.environ[_LEVEL]
