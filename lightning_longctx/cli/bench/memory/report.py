"""What ``bench memory`` says: rows for programs, and a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.memory.outcome import DDP, LONGCTX, Outcome
from lightning_longctx.cli.bench.report import NOISY, duration, size
from lightning_longctx.cli.bench.rows import Row, spread
from lightning_longctx.memory.policy import GIB

SLACK = 1.02
"""By how much a fixed policy may exceed a budget and still count as one that fits: budgets come from predictions."""


def check(found: Sequence[Outcome]) -> None:
    """See that policies did in attention what they say.

    Raises:
        WrongResultError: ``selective`` ran attention more often than ``none``, or sent other bytes.
    """
    by_case = {outcome.case: outcome for outcome in found if outcome.system == LONGCTX}
    none, selective = by_case.get("none"), by_case.get("selective")
    if none is None or selective is None:
        return
    for what, expected, actual in (
        ("bytes by rank sent in attention", none.sent, selective.sent),
        ("forward passes of attention", none.rings, selective.rings),
    ):
        if actual != expected:
            raise WrongResultError(f"{what} in one step are {actual} under selective, and {expected} under none.")


def throughput(outcome: Outcome) -> float:
    """Tokens a second, of all ranks: under DDP each has a sequence of its own."""
    sequences = outcome.ranks if outcome.system == DDP else 1
    return sequences * outcome.tokens / median(outcome.seconds)


def rows_of(found: Sequence[Outcome]) -> list[Row]:
    """One row for each; efficiency is its tokens a second over those of the best."""
    best = max(map(throughput, found))
    return [
        Row(
            case=outcome.case,
            system=outcome.system,
            ranks=outcome.ranks,
            tokens=outcome.tokens,
            **outcome.kind,
            schedule="auto" if outcome.system == LONGCTX else "",
            seconds_median=median(outcome.seconds),
            seconds_single=None,
            efficiency=throughput(outcome) / best,
            bytes_sent_mean=fmean(outcome.sent),
            bytes_sent_max=max(outcome.sent),
            bytes_outer_max=None,
            peak_growth_bytes=outcome.growth,
        )
        for outcome in found
    ]


def report(console: Console, found: Sequence[Outcome], budget_gib: float | None) -> None:
    """Print what came out, and how far to trust it.

    Args:
        console: Where to.
        found: In the order of the rows.
        budget_gib: If the longest sequence was searched.
    """
    if budget_gib is None:
        _policies(console, found)
    else:
        _longest(console, found, budget_gib)


def _policies(console: Console, found: Sequence[Outcome]) -> None:
    first = found[0]
    title = f"one training step by policy, {first.tokens:,} tokens, {first.ranks} ranks"
    spreads = [spread(outcome.seconds) for outcome in found]
    rows = [
        (
            outcome.case,
            duration(median(outcome.seconds)),
            f"{spread:.0%}",
            size(outcome.growth),
            size(outcome.allocated),
            str(outcome.rings),
            size(max(outcome.sent)),
        )
        for outcome, spread in zip(found, spreads, strict=True)
    ]
    console.print(_table(title, ("policy", "median", "spread", "memory", "allocated", "attention", "sent"), rows))
    if any(outcome.budget is not None for outcome in found):
        _promises(console, found)
    lines = [
        f"median     of {len(first.seconds)} steps, each as slow as its slowest rank",
        "spread     slowest step over fastest step, minus 1",
        "memory     what a step takes beyond what was there before it, at most, on the rank where that is most",
        "allocated  the same in bytes of tensors, without what the C library holds and does not use",
        "attention  forward passes of ring attention in one step",
        "sent       bytes in the attention of one step, of the rank that sends most",
    ]
    if max(spreads) > NOISY:
        lines.append("\nNoisy: repeat on a quiet machine, or with more --repeats, before you quote a time.")
    print("\n".join(lines), file=console.file)


def _promises(console: Console, found: Sequence[Outcome]) -> None:
    """Plans that were solved for a budget: is it kept, and does any fixed policy that fits it run faster?"""
    fixed = [outcome for outcome in found if outcome.budget is None]
    rows = []
    for outcome in found:
        if outcome.budget is None or outcome.allocated is None or outcome.predicted is None:
            continue
        fits = [other for other in fixed if other.allocated is not None and other.allocated <= outcome.budget * SLACK]
        best = min(fits, key=lambda other: median(other.seconds), default=None)
        ratio = "" if best is None else f"{median(outcome.seconds) / median(best.seconds):.3f}"
        error = f"{outcome.allocated / outcome.predicted - 1:+.1%}"
        bytes_ = (size(outcome.budget), size(outcome.predicted), size(outcome.allocated), error)
        rows.append((outcome.case, *bytes_, "" if best is None else best.case, ratio))
    headings = ("policy", "budget", "predicted", "allocated", "error", "best fixed", "time / its")
    console.print(_table("plans that were solved for a budget", headings, rows))


def _longest(console: Console, found: Sequence[Outcome], budget_gib: float) -> None:
    rows = [
        (
            outcome.system,
            outcome.case,
            f"{outcome.tokens:,}{'+' * outcome.capped}",
            f"{outcome.growth / GIB:.3f} GiB",
            duration(median(outcome.seconds)),
        )
        for outcome in found
    ]
    title = f"longest sequence within {budget_gib:g} GiB a process, {found[0].ranks} ranks"
    console.print(_table(title, ("system", "policy", "tokens", "memory", "step"), rows))
    tokens = {outcome.system: outcome.tokens for outcome in found}
    lines = [
        f"ratio   {tokens[LONGCTX] / tokens[DDP]:.1f}: longest sequence of longctx over that of ddp",
        "tokens  of one sequence, which all ranks of longctx share; under ddp every rank has one of its own",
        "memory  what a step of that length takes beyond what was there before it, on the rank where that is most",
        "step    time of that one step, on the slowest rank",
    ]
    if any(outcome.capped for outcome in found):
        lines.append("+       is as long as max_tokens allows; a longer one may fit")
    print("\n".join(lines), file=console.file)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
