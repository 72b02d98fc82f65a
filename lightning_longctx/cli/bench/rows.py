"""What a bench writes for programs: one row a system, the same columns for every bench."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_longctx.cli.bench.attention_case import AttentionCase
    from lightning_longctx.cli.bench.measure import Measured
    from lightning_longctx.cli.bench.systems import System


@dataclass(frozen=True)
class Row:
    """One system on one case; the fields are the columns of every bench, in order. None is an empty cell."""

    case: str
    system: str
    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    dtype: str
    mask: str
    layout: str
    schedule: str
    seconds_median: float
    seconds_single: float | None
    efficiency: float
    bytes_sent_mean: float
    bytes_sent_max: int
    bytes_outer_max: int | None
    peak_growth_bytes: int | None


COLUMNS = tuple(field.name for field in fields(Row))


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def efficiency(seconds: float, seconds_single: float, ranks: int, cores: int) -> float:
    """Time of one process, shared evenly by the ranks, over the time that the ranks took together.

    More ranks than cores take turns, so the best they can do is the time of one process over the number of cores.
    """
    return seconds_single / min(ranks, cores) / seconds


def spread(seconds: Sequence[float]) -> float:
    """Slowest of several runs over the fastest, minus 1."""
    return max(seconds) / min(seconds) - 1


def row_of(bench: str, system: System, case: AttentionCase, measured: Mapping[str, Measured], cores: int) -> Row:
    """What one system did on a case, against the one called ``single``."""
    result, single = measured[system.name], measured["single"].seconds_median
    ranks = system.num_ranks(case)
    return Row(
        case=bench,
        system=system.name,
        ranks=ranks,
        tokens=case.tokens,
        heads=case.heads,
        kv_heads=case.kv_heads,
        width=case.width,
        dtype=case.dtype,
        mask=case.mask,
        **system.describe(case),
        seconds_median=result.seconds_median,
        seconds_single=single,
        efficiency=efficiency(result.seconds_median, single, ranks, cores),
        bytes_sent_mean=result.bytes_sent_mean,
        bytes_sent_max=result.bytes_sent_max,
        bytes_outer_max=result.bytes_outer_max,
        peak_growth_bytes=result.peak_growth,
    )


def check_csv(csv: str | None) -> None:
    """Raise ``ValueError`` unless the option names a file that can be written, or none."""
    if csv is not None and (Path(csv).is_dir() or not Path(csv).absolute().parent.is_dir()):
        raise ValueError(f"csv={csv} is no file in a folder that exists.")


def keep(csv: str | None, rows: Sequence[Row]) -> None:
    """Write the rows to the file of the option, if there is one, and say so."""
    if csv is not None:
        write_csv(Path(csv), rows)
        print(f"\nWritten to {csv}.")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows under a line of ``COLUMNS``, in place of what the file had."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(["" if value is None else value for value in astuple(row)] for row in rows)
