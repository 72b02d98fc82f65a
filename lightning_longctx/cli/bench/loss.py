"""``bench loss``: its options, and the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_longctx.cli.bench.rows import Row, check_csv, keep

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_longctx.cli.bench.loss_systems import LossCase, LossMeasured


@dataclass(frozen=True)
class LossBench:
    """Measure peak memory and time of the output matrix and its cross entropy, forward and backward.

    `untiled` makes all logits at once, as models do; `tiled` is loss.linear_cross_entropy, a tile of tokens at a time.
    First every system has to compute the same sum and gradients, at 300 tokens; one that does not is an error. Then
    they run in turn, in one process with one thread, from the same inputs.

    Args:
        vocab: Size of the vocabulary.
        tokens: How many tokens there are; every 16th has no label.
        width: Of their states.
        dtype: Of states and matrix.
        tile_tokens: Tokens of a tile; null lets linear_cross_entropy choose.
        peers: Also measure torch's own F.linear_cross_entropy with its default options, where torch has it.
        repeats: Timed runs of each system; the median counts.
        warmup: Runs of each system before those; the growth of memory is that of the last of them.
        csv: File for one row a system, replaced if it exists; the vocabulary is in the column layout. null writes none.

    Raises:
        ValueError: An option is out of range, or torch has no loss of its own; the message names it.
    """

    vocab: int = 49152
    tokens: int = 16384
    width: int = 384
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    tile_tokens: int | None = None
    peers: bool = False
    repeats: int = 3
    warmup: int = 1
    csv: str | None = None

    def __post_init__(self) -> None:
        import torch.nn.functional as F

        for name in ("vocab", "tokens", "width", "tile_tokens", "repeats", "warmup"):
            least = 2 if name == "vocab" else 1  # the loss over one id is 0, and nothing can be compared
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        if self.peers and not hasattr(F, "linear_cross_entropy"):
            raise ValueError("peers=True: this torch has no linear_cross_entropy of its own. Leave peers out.")
        check_csv(self.csv)

    def case(self) -> LossCase:
        """What every system computes."""
        from lightning_longctx.cli.bench.loss_systems import LossCase

        return LossCase(self.vocab, self.tokens, self.width, self.dtype)

    def run(self) -> None:
        """Check, measure, print the table and write the CSV file.

        Raises:
            WrongResultError: A system computes something else.
        """
        from rich.console import Console

        from lightning_longctx.cli.bench.loss_systems import check_systems, loss_systems, measure_in_turn

        case, systems = self.case(), loss_systems(self.tile_tokens, self.peers)
        check_systems(systems, case)
        measured = measure_in_turn(systems, case, self.repeats, self.warmup)
        report(Console(), case, measured)
        keep(self.csv, rows_of(case, measured))


def rows_of(case: LossCase, measured: Sequence[LossMeasured]) -> list[Row]:
    """One row a system; efficiency is the first one's time over the system's."""
    return [
        Row(
            case="loss",
            system=each.name,
            ranks=1,
            tokens=case.tokens,
            heads=0,
            kv_heads=0,
            width=case.width,
            dtype=case.dtype,
            mask="labels",
            layout=f"vocab:{case.vocab}",
            schedule="",
            seconds_median=each.seconds_median,
            seconds_single=None,
            efficiency=measured[0].seconds_median / each.seconds_median,
            bytes_sent_mean=0.0,
            bytes_sent_max=0,
            bytes_outer_max=None,
            peak_growth_bytes=each.peak_growth,
        )
        for each in measured
    ]


def report(console: Console, case: LossCase, measured: Sequence[LossMeasured]) -> None:
    """Print what came out; ratios are against the first system."""
    from rich.table import Table

    from lightning_longctx.cli.bench.report import NOISY, duration, size

    title = f"output matrix and cross entropy, vocabulary {case.vocab:,}, {case.tokens:,} tokens, width {case.width}"
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(("system", "median", "ratio", "spread", "peak growth", "ratio")):
        table.add_column(heading, justify="right" if index else "left")
    seconds, growth = measured[0].seconds_median, measured[0].peak_growth
    for each in measured:
        grown = ("unknown", "") if each.peak_growth is None else (size(each.peak_growth), "")
        if each.peak_growth is not None and growth:
            grown = size(each.peak_growth), f"{each.peak_growth / growth:.3f}"
        times = duration(each.seconds_median), f"{each.seconds_median / seconds:.2f}", f"{each.spread:.0%}"
        table.add_row(each.name, *times, *grown)
    console.print(table)
    lines = [
        "median       forward and backward, one thread",
        "spread       slowest run over fastest run, minus 1",
        "peak growth  of the resident set in one run, beyond states, matrix and labels",
        "ratio        to untiled",
    ]
    if max(each.spread for each in measured) > NOISY:
        lines.append("\nNoisy: repeat on a quiet machine, or with more --repeats, before you quote a figure.")
    print("\n".join(lines), file=console.file)
