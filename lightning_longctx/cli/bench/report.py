"""What a bench says to people at the end: a table, how to read it, and whether to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from lightning_longctx.cli.bench.measure import Measured
from lightning_longctx.cli.bench.rows import Row

NOISY = 0.05
"""Shares above this are pointed out."""

HEADINGS = ("system", "ranks", "median", "spread", "efficiency", "sent", "outer", "memory")


def report(console: Console, title: str, rows: Sequence[Row], measured: Mapping[str, Measured], cores: int) -> None:
    """Print what came out.

    Args:
        console: Where to.
        title: What was computed.
        rows: One for each system.
        measured: The same by system, with all repeats.
        cores: That the ranks shared.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row.system,
            str(row.ranks),
            duration(row.seconds_median),
            f"{measured[row.system].spread:.0%}",
            f"{row.efficiency:.3f}",
            size(row.bytes_sent_max),
            size(row.bytes_outer_max),
            size(row.peak_growth_bytes),
        )
    console.print(table)
    num_repeats = len(measured["single"].seconds)
    print(footnotes(max(row.ranks for row in rows), cores, num_repeats), file=console.file)
    if warning := doubts(measured):
        print(f"\n{warning}", file=console.file)


def footnotes(ranks: int, cores: int, repeats: int) -> str:
    """How to read the table."""
    share = f"{ranks} ranks" if ranks <= cores else f"{cores} cores, which {ranks} ranks share"
    return (
        f"median      of {repeats} runs, forward and backward; a run is as slow as its slowest rank\n"
        "spread      slowest run over fastest run, minus 1\n"
        f"efficiency  median of single / {min(ranks, cores)} ({share}) / median\n"
        "sent        bytes in one run, of the rank that sends most; outer: of these, to other inner rings\n"
        "memory      growth of the resident set in one run, of the rank where it is largest"
    )


def doubts(measured: Mapping[str, Measured]) -> str:
    """Why these figures should not be quoted; empty if nothing speaks against it."""
    stolen, spread = 1 - measured["single"].core_share, max(each.spread for each in measured.values())
    reasons = []
    if stolen > NOISY:
        reasons.append(f"other work took {stolen:.0%} of the core that single ran on")
    if spread > NOISY:
        reasons.append(f"the slowest run took {spread:.0%} longer than the fastest")
    advice = "Repeat on a quiet machine, or with more --tokens or --repeats, before you quote a figure."
    return f"Noisy: {' and '.join(reasons)}. {advice}" if reasons else ""


def duration(seconds: float) -> str:
    """Three digits with a unit: ``12.3 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def size(num_bytes: int | None) -> str:
    """Decimal units: ``33.6 MB``; nothing is a dash, an unknown number a question mark."""
    return "?" if num_bytes is None else decimal(num_bytes) if num_bytes else "-"
