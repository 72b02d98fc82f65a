"""When one rank fails: say which and why, and let no process stay behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_longctx.attention.peer_errors import PeerError, cause_of
from lightning_longctx.strategy.failure.reports import Report, Reports, open_reports
from lightning_longctx.strategy.failure.waiting import Wait, find_wait, pass_of

GRACE_SECONDS = 2.0
"""How long other processes may take to print their own error, or to leave their report."""

STOP_SECONDS = 30.0
"""How long they may take where all have agreed to stop."""

LAST_SAVE_SECONDS = 5.0
"""How long a rank with an error waits for the others before it gives up a checkpoint that all must write."""

NOT_CALLED = "mixed torch.tensor and dtensor"
_MOST_CHARACTERS = 300


class Failure:
    """What a rank does about an error, its own or that of another one."""

    def __init__(self) -> None:
        self._reports: Reports | None = None
        self._handled: BaseException | None = None

    def meet(self) -> None:
        """Get to know the other ranks; a collective over the world."""
        self._reports = open_reports() if dist.get_world_size() > 1 else None

    def handle(self, exception: BaseException, launcher: object) -> None:
        """Explain an error, and end the processes that this one has launched."""
        if exception is self._handled:
            return
        self._handled = exception
        stopped = isinstance(exception, SIGTERMException)
        if not stopped:
            explain(exception, *_place(), self._reports)
        end_processes(getattr(launcher, "procs", ()), STOP_SECONDS if stopped else GRACE_SECONDS)

    def check_save(self, trainer: Trainer, launcher: object) -> None:
        """Before a checkpoint is made: if an error is the reason, all ranks must have it, for all write their part.

        Raises:
            BaseException: The error itself, if others did not come.
        """
        exception = sys.exception()
        if self._reports is None or exception is None or trainer.state.status != TrainerStatus.INTERRUPTED:
            return
        if not self._reports.all_meet(f"save/{trainer.global_step}", LAST_SAVE_SECONDS):
            exception.add_note("(no checkpoint was written for this error: not all ranks came to write their part)")
            self.handle(exception, launcher)
            raise exception


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def explain(exception: BaseException, rank: int, world_size: int, reports: Reports | None = None) -> None:
    """Add notes to an error: where it happened, and what it means if its own words do not say.

    Args:
        exception: Raised on this rank.
        rank: This one.
        world_size: Number of ranks.
        reports: Of the run; None before the ranks have met.
    """
    if world_size > 1:
        exception.add_note(f"(on rank {rank} of {world_size})")
    if NOT_CALLED in str(exception).lower():
        exception.add_note(
            "A parameter was used outside the call of the module that holds it. Layers in an nn.ModuleList are "
            "distributed one by one: call the layer itself, layer(x), not a part of it, layer.attention(x)."
        )
    report = report_of(exception)
    if reports is not None:
        reports.leave(report)
    if report.cause is not None:
        if (where := where_of(exception, report)) is not None:
            exception.add_note(where)
        for note in _reasons(report, rank, reports):
            exception.add_note(note)


def report_of(exception: BaseException) -> Report:
    """What the other ranks should know of an error."""
    first_line = (str(exception).splitlines() or [""])[0]
    text = f"{type(exception).__name__}: {first_line}"[:_MOST_CHARACTERS].removesuffix(": ")
    if (cause := cause_of(exception)) is None:
        return Report(text)
    wait = find_wait(exception) or Wait("", ())
    return Report(text, cause, wait.place, wait.ranks)


def where_of(exception: BaseException, report: Report) -> str | None:
    """Where a rank waited, if its error does not say it in full."""
    part = f", in {part} of attention" if (part := pass_of(exception)) else ""
    if isinstance(exception, PeerError):
        return f"(in {part.removeprefix(', in ')})" if part else None
    if not report.place:
        return None
    return f"It waited on {report.place}{part}, with ranks {_listed(report.ranks)}."


def blame(report: Report, rank: int, others: Mapping[int, Report], gone: Mapping[int, int]) -> list[str]:
    """Who is the reason that a rank was late or lost, in a sentence for each; empty if nobody is known.

    Args:
        report: This rank's.
        rank: This one.
        others: Reports of others so far.
        gone: Process ids of ranks that are known to have ended.
    """
    failed = [f"rank {other} failed: {told.text}" for other, told in others.items() if told.cause is None]
    silent = [
        f"rank {other} has ended without a word (process {process}): killed, out of memory, or crashed"
        for other, process in gone.items()
        if other not in others and other != rank
    ]
    if failed or silent:
        return [*failed, *silent]
    late = {other: told for other, told in others.items() if told.cause == "late" and other in report.ranks}
    came = [rank, *(other for other, told in late.items() if told.ranks == report.ranks)]
    absent = [other for other in report.ranks if other not in came]
    if report.cause != "late" or not absent or not report.place:
        return []
    elsewhere = [
        f"rank {other} itself waited on {late[other].place}, with ranks {_listed(late[other].ranks)}"
        for other in absent
        if other in late
    ]
    return [f"rank {_listed(absent)} did not come there within the timeout", *elsewhere]


def _reasons(report: Report, rank: int, reports: Reports | None) -> list[str]:
    """Notes; waits a little for the other ranks to say what they know."""
    begun, known = time.monotonic(), []
    while reports is not None and time.monotonic() < begun + GRACE_SECONDS:
        gone = {other: reports.process_of(other) for other in reports.gone()}
        known = blame(report, rank, reports.read(), gone)
        if known and report.cause == "lost":
            break
        time.sleep(0.1)
    if known:
        return [f"The reason: {'; '.join(known)}."]
    if report.cause == "lost":
        return ["Another rank has ended: its own error, printed by that process, is the cause."]
    return []


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def end_processes(processes: Sequence[subprocess.Popen], grace: float = GRACE_SECONDS) -> None:
    """End what this process has launched: a rank that waits in a collective for one that failed would wait for long."""
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
