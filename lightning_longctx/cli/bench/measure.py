"""The driver: check every system, then time all of them in turn, in one set of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_longctx.cli.bench.gate import errors, refuse_wrong
from lightning_longctx.cli.bench.ranks import Ranks
from lightning_longctx.cli.bench.rows import spread
from lightning_longctx.cli.bench.systems import Case, Job, System
from lightning_longctx.memory.resident import peak_growth
from lightning_longctx.testing.cluster import Place


class Sample(NamedTuple):
    """One run on one rank."""

    seconds: float
    core_seconds: float
    sent: dict[str, int]


@dataclass(frozen=True)
class Measured:
    """What one system did.

    Args:
        seconds: Of every repeat, its slowest rank.
        core_seconds: Processor time of every repeat, mean over the ranks.
        sent: Bytes sent in one run, by rank and link; the same in every run.
        peak_growth: Bytes by which the resident set of the worst rank grew in one run; None where unknown.
    """

    seconds: tuple[float, ...]
    core_seconds: tuple[float, ...]
    sent: tuple[dict[str, int], ...]
    peak_growth: int | None

    @property
    def seconds_median(self) -> float:
        """Median over the repeats."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest repeat over fastest, minus 1."""
        return spread(self.seconds)

    @property
    def core_share(self) -> float:
        """Processor time over wall time. Below 1 if ranks wait for each other, or other work takes the cores."""
        return sum(self.core_seconds) / sum(self.seconds)

    @property
    def bytes_sent_mean(self) -> float:
        """Mean over the ranks."""
        return fmean(sum(links.values()) for links in self.sent)

    @property
    def bytes_sent_max(self) -> int:
        """Of the rank that sends most."""
        return max(sum(links.values()) for links in self.sent)

    @property
    def bytes_outer_max(self) -> int:
        """Of the rank that sends most to other inner rings."""
        return max(links.get("outer", 0) for links in self.sent)


class Worker:
    """What one rank holds: a job for each system."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._jobs: dict[str, Job] = {}

    def check(self, system: System, case: Case) -> dict[str, float]:
        """Run a small case once; see ``gate.errors``."""
        job = system.setup(case, self._rank)
        found = errors(job, case)
        job.close()
        return found

    def prepare(self, system: System, case: Case) -> None:
        """Make the inputs of the case to time."""
        self._jobs[system.name] = system.setup(case, self._rank)

    def warm_up(self, name: str) -> int | None:
        """One run that is not timed; returns how much memory it took."""
        return peak_growth(self._jobs[name].run)

    def time(self, name: str, together: bool) -> Sample:
        """One run; ``together`` with all other ranks."""
        job = self._jobs[name]
        before = dict(job.sent_bytes())
        if together:
            dist.barrier()
        start, core_start = time.perf_counter(), time.process_time()
        results = job.run()
        seconds, core_seconds = time.perf_counter() - start, time.process_time() - core_start
        del results
        sent = {link: total - before.get(link, 0) for link, total in job.sent_bytes().items()}
        return Sample(seconds, core_seconds, sent)


def measure(
    systems: Sequence[System],
    case: Any,
    num_ranks: int,
    repeats: int,
    warmup: int,
    progress: Callable[[str], None] = lambda doing: None,
    places: Sequence[Place] = (),
) -> dict[str, Measured]:
    """Time all systems on one case, in turn: A B A B ..., so that a machine that slows down slows all of them.

    Args:
        systems: What to compare.
        case: What to compute.
        num_ranks: Processes, of one thread each.
        repeats: Timed runs of each system.
        warmup: Runs of each before that, at least one: memory is measured in the last of them.
        progress: Called with a word on what comes next, ``num_stages`` times.
        places: Where the processes run, in an emulated cluster. Else here.

    Raises:
        WrongResultError: A system's results are not those of the formula. Nothing is timed then.
    """
    progress(f"starting {num_ranks} processes")
    with Ranks(num_ranks, Worker, places) as ranks:
        for system in systems:
            progress(f"checking {system.name}")
            found = ranks.call("check", system, case.small(), num_ranks=system.num_ranks(case))
            refuse_wrong(system.name, found, case.small())
        for system in systems:
            ranks.call("prepare", system, case, num_ranks=system.num_ranks(case))
        growths: dict[str, list[int | None]] = {}
        for _ in range(warmup):
            for system in systems:
                progress(f"warming up {system.name}")
                growths[system.name] = ranks.call("warm_up", system.name, num_ranks=system.num_ranks(case))
        samples: dict[str, list[list[Sample]]] = {system.name: [] for system in systems}
        for _ in range(repeats):
            for system in systems:
                progress(f"timing {system.name}")
                together = system.num_ranks(case) > 1
                samples[system.name].append(ranks.call("time", system.name, together, num_ranks=system.num_ranks(case)))
    return {name: _summary(name, repeated, growths[name]) for name, repeated in samples.items()}


def num_stages(systems: Sequence[System], repeats: int, warmup: int) -> int:
    """How often ``measure`` reports progress."""
    return 1 + len(systems) * (1 + warmup + repeats)


def _summary(name: str, repeated: list[list[Sample]], growths: list[int | None]) -> Measured:
    sent = [tuple(sample.sent for sample in by_rank) for by_rank in repeated]
    if any(each != sent[0] for each in sent):
        raise RuntimeError(f"{name} sent other amounts in other repeats of the same work: {sent}.")
    known = [growth for growth in growths if growth is not None]
    return Measured(
        seconds=tuple(max(sample.seconds for sample in by_rank) for by_rank in repeated),
        core_seconds=tuple(fmean(sample.core_seconds for sample in by_rank) for by_rank in repeated),
        sent=sent[0],
        peak_growth=max(known) if len(known) == len(growths) else None,
    )
