"""Measures one training step under ``full``: bytes and seconds of every block and region, and the peaks of the step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_longctx._upstream import TorchDispatchMode
from lightning_longctx.memory.checkpointed import CheckpointedBlock, Contexts
from lightning_longctx.memory.choice.costs import LOSS, BlockCost, Moment, RegionCost, StepCosts
from lightning_longctx.memory.choice.live_bytes import Stretch, live_bytes
from lightning_longctx.memory.regions import Regions, can_be_kept, new_storages, parameter_regions


class Stopwatch:
    """Adds up seconds of work on a device; on CUDA they are known when the device is done.

    Args:
        device: That works.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    def now(self) -> Any:
        """A point in time."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, begin: Any) -> None:
        """Add what passed since a point."""
        self._spans.append((begin, self.now()))

    def seconds(self) -> float:
        """All of it."""
        if self._device.type != "cuda":
            return sum(end - begin for begin, end in self._spans)
        torch.cuda.synchronize(self._device)
        return sum(begin.elapsed_time(end) for begin, end in self._spans) / 1000


@dataclass
class _Watched:
    """What has been seen of one block."""

    regions: Regions
    again: Stopwatch
    by_region: dict[str, Stopwatch]
    kept: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Bytes that keeping a region takes, by pass."""
    all_bytes: int = 0


class StepMeter:
    """From ``begin`` to ``end`` the blocks are measured; they must run under ``full``.

    Args:
        blocks: In order.
        module: The whole one.
        device: That it runs on.
        tiled: Submodules of the blocks that run in tiles.
    """

    def __init__(
        self, blocks: Sequence[CheckpointedBlock], module: nn.Module, device: torch.device, tiled: Collection[str]
    ) -> None:
        self._blocks, self._device = blocks, device
        self._live = live_bytes(device, module)
        self._step = Stopwatch(device)
        self._names = [parameter_regions(block.block, tiled) for block in blocks]
        self._watched: list[_Watched] = []
        self._stretches: list[tuple[Moment, int | None]] = []
        """Of each: what happens, and the block that runs again in it."""
        self._held: list[int] = []

    def begin(self) -> None:
        """The step begins."""
        self._watched = [
            _Watched(Regions(block.block, names), Stopwatch(self._device), {n: Stopwatch(self._device) for n in names})
            for block, names in zip(self._blocks, self._names, strict=True)
        ]
        for index, block in enumerate(self._blocks):
            block.watch = lambda index=index: self._contexts(index)
        self._live.start()
        self._stretches, self._held = [(Moment("before the blocks", 0, ()), None)], []
        self._begin = self._step.now()

    def end(self) -> StepCosts:
        """The step is over: what it cost."""
        self._step.add(self._begin)
        found = self._live.stop()
        self._leave()
        for (_, again), stretch in zip(self._stretches, found, strict=True):
            if again is not None:
                watched = self._watched[again]
                watched.all_bytes = max(watched.all_bytes, stretch.end - stretch.start)
        blocks = (self._cost(index) for index in range(len(self._blocks)))
        return StepCosts(self._step.seconds(), tuple(blocks), self._moments(found))

    def abandon(self) -> None:
        """The step was left halfway."""
        self._leave()
        self._live.stop()

    def mark(self, name: str, passing: Sequence[int], again: int | None = None) -> None:
        """Something else begins."""
        self._live.mark()
        known = tuple(index for index in passing if index >= 0)
        self._stretches.append((Moment(name, 0, tuple(sorted(self._held)), known), again))

    def first_pass(self, index: int, begins: bool) -> None:
        """A block begins its first pass, or ends it: until then it has what will be offloaded, and others go before."""
        if begins:
            self.mark(f"forward of {self._blocks[index].name}", (index - 2, index - 1, index))
            return
        self._held.append(index)
        self.mark(LOSS if index == len(self._blocks) - 1 else "between blocks", (index - 1, index))

    def recomputation(self, index: int, begins: bool) -> None:
        """A block begins to run again, or has all that backward needs; the one before is fetched meanwhile."""
        if begins and index in self._held:  # not there if backward runs twice over a graph
            self._held.remove(index)
        self.mark(f"backward of {self._blocks[index].name}", (index - 1,), index if begins else None)

    def _leave(self) -> None:
        for block, watched in zip(self._blocks, self._watched, strict=True):
            block.watch = None
            watched.regions.remove()

    def _contexts(self, index: int) -> Contexts:
        watched = self._watched[index]
        return _FirstPass(self, index, watched), _Recomputation(self, index, watched)

    def _cost(self, index: int) -> BlockCost:
        watched = self._watched[index]
        regions = tuple(
            RegionCost(name, watch.seconds(), max(watched.kept[name], default=0))
            for name, watch in watched.by_region.items()
        )
        return BlockCost(self._blocks[index].name, watched.again.seconds(), watched.all_bytes, regions)

    def _moments(self, found: Sequence[Stretch]) -> tuple[Moment, ...]:
        """Micro-batches of a window, and the two parts of a backward, count as one moment: the one with most bytes."""
        peaks: dict[Moment, int] = {}
        for (moment, _), stretch in zip(self._stretches, found, strict=True):
            peaks[moment] = max(peaks.get(moment, 0), stretch.peak)
        return tuple(replace(moment, peak_bytes=peak) for moment, peak in peaks.items())


class _FirstPass(TorchDispatchMode):
    """Notes what keeping the results of a region would take."""

    def __init__(self, meter: StepMeter, index: int, watched: _Watched) -> None:
        super().__init__()
        self._meter, self._index, self._watched = meter, index, watched
        self._kept: dict[str, int] = defaultdict(int)

    def __enter__(self) -> Any:
        self._watched.regions.enter()
        self._meter.first_pass(self._index, begins=True)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for name, size in self._kept.items():
            self._watched.kept[name].append(size)
        self._meter.first_pass(self._index, begins=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        region = self._watched.regions.of(func)
        if region is not None and can_be_kept(func, args, kwargs):
            self._kept[region] += sum(one.nbytes() for one in new_storages(results, (args, kwargs)))
        return results


class _Recomputation(TorchDispatchMode):
    """Times every region."""

    def __init__(self, meter: StepMeter, index: int, watched: _Watched) -> None:
        super().__init__()
        self._meter, self._index, self._watched = meter, index, watched

    def __enter__(self) -> Any:
        self._watched.regions.enter()
        self._meter.recomputation(self._index, begins=True)
        self._begin = self._watched.again.now()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._watched.again.add(self._begin)
        self._meter.recomputation(self._index, begins=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        region = self._watched.regions.of(func)
        watch = self._watched.by_region.get(region) if region is not None and can_be_kept(func, args, kwargs) else None
        if watch is None:
            return func(*args, **(kwargs or {}))
        begin = watch.now()
        results = func(*args, **(kwargs or {}))
        watch.add(begin)
        return results
