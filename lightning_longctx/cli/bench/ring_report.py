"""What ``bench ring`` says to people at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from lightning_longctx.cli.bench.measure import Measured
from lightning_longctx.cli.bench.report import doubts, duration, size
from lightning_longctx.cli.bench.rows import Row

HEADINGS = ("system", "median", "spread", "speedup", "efficiency", "NIC", "memory")

FOOTNOTES = """median      of {repeats} runs, forward and backward; a run is as slow as its slowest rank
spread      slowest run over fastest run, minus 1
speedup     how many times faster than flat
efficiency  median of single / cores that the ranks share / median
NIC         bytes that the busiest network card sends in one run
memory      growth of the resident set in one run, of the rank where it is largest"""


def report(
    console: Console,
    title: str,
    rows: Sequence[Row],
    measured: Mapping[str, Measured],
    ranks_per_nic: int,
) -> None:
    """Print what came out.

    Args:
        console: Where to.
        title: What was computed, where.
        rows: One for each system.
        measured: The same by system, with all repeats.
        ranks_per_nic: Ranks that share one network card.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        result = measured[row.system]
        table.add_row(
            row.system,
            duration(row.seconds_median),
            f"{result.spread:.0%}",
            speedup(row.system, measured),
            f"{row.efficiency:.3f}",
            size(busiest_nic(result, ranks_per_nic)),
            size(row.peak_growth_bytes),
        )
    console.print(table)
    print(FOOTNOTES.format(repeats=len(measured["single"].seconds)), file=console.file)
    if warning := doubts(measured):
        print(f"\n{warning}", file=console.file)


def speedup(system: str, measured: Mapping[str, Measured]) -> str:
    """How many times faster than the flat ring; a dash for ``single``, or where the flat ring did not run."""
    if system == "single" or "flat" not in measured:
        return "-"
    return f"{measured['flat'].seconds_median / measured[system].seconds_median:.2f}x"


def busiest_nic(result: Measured, ranks_per_nic: int) -> int:
    """Bytes that the busiest network card sends in one run."""
    outer = [links.get("outer", 0) for links in result.sent]
    return max(sum(outer[first : first + ranks_per_nic]) for first in range(0, len(outer), ranks_per_nic))
