"""What ``bench step`` says: rows for programs, and a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table

from lightning_longctx.cli.bench.bare_loop import BARE, LONGCTX, Steps
from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.report import NOISY, duration, size
from lightning_longctx.cli.bench.rows import Row, spread
from lightning_longctx.plan.mask import Mask
from lightning_longctx.strategy import LongContextStrategy

AGREEMENT = 1e-5
"""How far apart the losses may be, relatively: both train the same weights on the same samples."""


@dataclass(frozen=True)
class Pairs:
    """Steps of both, in pairs.

    Args:
        seconds: By system, of every timed step, its slowest rank.
        sent: By system, bytes sent in attention in one step, by rank.
    """

    seconds: Mapping[str, Sequence[float]]
    sent: Mapping[str, Sequence[int]]

    @property
    def overhead(self) -> float:
        """Median over the pairs of the Trainer's step over the bare one, minus 1."""
        pairs = zip(self.seconds[LONGCTX], self.seconds[BARE], strict=True)
        return median(longctx / bare for longctx, bare in pairs) - 1


def summarise(by_rank: Sequence[Mapping[str, Steps]], warmup: int) -> Pairs:
    """Check that both have trained alike, and leave the warm-up out.

    Raises:
        WrongResultError: They have not.
    """
    for bare, longctx in zip(by_rank[0][BARE].losses, by_rank[0][LONGCTX].losses, strict=True):
        if not abs(longctx - bare) <= AGREEMENT * abs(bare):
            raise WrongResultError(
                f"the loss of a step is {longctx} in the Trainer and {bare} in the bare loop: they do not train alike. "
                "Has the module dropout, or another loss than the mean over its labels?"
            )
    steps = range(warmup, len(by_rank[0][BARE].seconds))
    return Pairs(
        {system: [max(rank[system].seconds[step] for rank in by_rank) for step in steps] for system in (BARE, LONGCTX)},
        {system: [rank[system].sent[-1] for rank in by_rank] for system in (BARE, LONGCTX)},
    )


def rows_of(trainer: Trainer, pairs: Pairs, tokens: int) -> list[Row]:
    """One row for each system; efficiency is the bare loop's time over the system's."""
    bare = median(pairs.seconds[BARE])
    return [
        Row(
            case="step",
            system=system,
            ranks=trainer.world_size,
            tokens=tokens,
            **kind_of_run(trainer),
            schedule="auto",
            seconds_median=median(pairs.seconds[system]),
            seconds_single=None,
            efficiency=bare / median(pairs.seconds[system]),
            bytes_sent_mean=fmean(pairs.sent[system]),
            bytes_sent_max=max(pairs.sent[system]),
            bytes_outer_max=None,
            peak_growth_bytes=None,
        )
        for system in (BARE, LONGCTX)
    ]


def kind_of_run(trainer: Trainer) -> dict[str, Any]:
    """Columns of a row that say what is run; sequences are whole and causal but under ``LongContextStrategy``."""
    module, masks, layout = trainer.lightning_module, "causal", "whole"
    heads, kv_heads = getattr(module, "attention_heads", None) or (0, 0)
    if isinstance(trainer.strategy, LongContextStrategy):
        sharding = trainer.strategy.batch_sharding
        masks, layout = " ".join(sorted({named(mask) for mask in sharding.masks})), sharding.layout
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "width": getattr(getattr(module, "config", None), "head_size", 0),
        "dtype": str(trainer.precision),
        "mask": masks,
        "layout": layout,
    }


def named(mask: Mask) -> str:
    """As ``--mask`` of the other benches calls it."""
    if mask.window is not None:
        return f"window:{mask.window}"
    return "causal" if mask.causal else "full"


def report(console: Console, rows: Sequence[Row], pairs: Pairs) -> None:
    """Print what came out, and how far to trust it."""
    table = Table(title=f"one training step, {rows[0].tokens:,} tokens, {rows[0].ranks} ranks", title_justify="left")
    for index, heading in enumerate(("system", "median", "spread", "sent")):
        table.add_column(heading, justify="right" if index else "left")
    spreads = {system: spread(seconds) for system, seconds in pairs.seconds.items()}
    for row in rows:
        sent = size(row.bytes_sent_max)
        table.add_row(row.system, duration(row.seconds_median), f"{spreads[row.system]:.0%}", sent)
    console.print(table)
    lines = [
        f"overhead    {pairs.overhead:+.1%}: longctx over bare, minus 1, median of {len(pairs.seconds[BARE])} pairs",
        "median      of the steps, each as slow as its slowest rank",
        "spread      slowest step over fastest step, minus 1",
        "sent        bytes in the attention of one step, of the rank that sends most",
    ]
    if max(spreads.values()) > NOISY:
        lines.append("\nNoisy: repeat on a quiet machine, or with more --repeats, before you quote a figure.")
    print("\n".join(lines), file=console.file)
