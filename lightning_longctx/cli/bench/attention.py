"""``bench attention``: its options, and the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_longctx.sequence.layout import LayoutName

if TYPE_CHECKING:
    from lightning_longctx.cli.bench.attention_systems import AttentionCase
    from lightning_longctx.cli.bench.measure import Measured
    from lightning_longctx.cli.bench.rows import Row

_POSITIVE = ("ranks", "tokens", "heads", "kv_heads", "width", "repeats", "warmup")


@dataclass(frozen=True)
class AttentionBench:
    """Time causal attention, forward and backward, spread over processes against one process.

    Starts --ranks processes of one thread each. First every system has to compute what plain attention gives, at about
    256 tokens; otherwise nothing is timed. Then the systems run in turn, so that a machine that gets slower does so for
    all of them. `single` is one process with PyTorch's own flash attention, `longctx` is this package.

    Args:
        ranks: Processes that share the sequence. More than the machine has cores take turns; efficiency then divides
            by the cores.
        tokens: Length of the whole sequence. Need not divide by the ranks.
        heads: Query heads.
        kv_heads: Key/value heads, which query heads share in groups; must divide heads. null is as many as heads.
        width: Width of one head.
        dtype: Of queries, keys and values.
        mask: Who may see whom.
        layout: Which tokens a rank holds.
        inner_ring: Ranks of one inner ring; must divide ranks. null is one flat ring.
        backend: What computes one tile; auto takes the fastest that can.
        repeats: Timed runs of each system; the median counts.
        warmup: Runs of each system before those; memory is measured in the last of them.
        csv: File for one row a system, replaced if it exists. null writes none.

    Raises:
        ValueError: An option does not fit the others; the message names it.
    """

    ranks: int = 2
    tokens: int = 16384
    heads: int = 8
    kv_heads: int | None = None
    width: int = 64
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    mask: Literal["causal"] = "causal"
    layout: LayoutName = "zigzag"
    inner_ring: int | None = None
    backend: str = "auto"
    repeats: int = 5
    warmup: int = 1
    csv: str | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self._check_sizes()
        if self.csv is not None and (Path(self.csv).is_dir() or not Path(self.csv).absolute().parent.is_dir()):
            raise ValueError(f"csv={self.csv} is no file in a folder that exists.")

    def _check_sizes(self) -> None:
        import torch

        from lightning_longctx.attention.backends import choose_backend
        from lightning_longctx.topology.degrees import Degrees, divisors

        if self.heads % (self.kv_heads or self.heads):
            allowed = " or ".join(map(str, divisors(self.heads)))
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}. Use kv_heads={allowed}.")
        if self.tokens < 2 * self.ranks:
            raise ValueError(f"tokens={self.tokens} are too few for ranks={self.ranks}: use {2 * self.ranks} or more.")
        Degrees(data=1, context=self.ranks, inner_ring=self.inner_ring)
        choose_backend(self.backend, torch.device("cpu"), getattr(torch, self.dtype), self.width)

    def case(self) -> AttentionCase:
        """What every system computes."""
        from lightning_longctx.cli.bench.attention_systems import AttentionCase

        return AttentionCase(
            ranks=self.ranks,
            tokens=self.tokens,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            width=self.width,
            dtype=self.dtype,
            mask=self.mask,
            layout=self.layout,
            inner_ring=self.inner_ring,
            backend=self.backend,
        )

    def run(self) -> None:
        """Measure, write the CSV file and print the table; progress goes to stderr.

        Raises:
            WrongResultError: A system does not compute plain attention.
        """
        from rich.console import Console

        from lightning_longctx.cli.bench.attention_systems import attention_systems
        from lightning_longctx.cli.bench.measure import measure, num_stages
        from lightning_longctx.cli.bench.progress import stages
        from lightning_longctx.cli.bench.report import report
        from lightning_longctx.cli.bench.rows import num_cores, write_csv

        systems = attention_systems()
        with stages(num_stages(systems, self.repeats, self.warmup)) as advance:
            measured = measure(systems, self.case(), self.ranks, self.repeats, self.warmup, advance)
        rows = self.rows(measured, num_cores())
        report(Console(), self.title, rows, measured, num_cores())
        if self.csv is not None:
            write_csv(Path(self.csv), rows)
            print(f"\nWritten to {self.csv}.")

    @property
    def title(self) -> str:
        """What was computed, in words."""
        case = self.case()
        grouped = f" ({case.kv_heads} for keys and values)" if case.kv_heads != case.heads else ""
        heads = f"{case.heads} heads{grouped} of width {case.width}"
        return f"{case.mask} attention, {case.tokens:,} tokens, {heads}, {case.dtype}, {case.layout}"

    def rows(self, measured: dict[str, Measured], cores: int) -> list[Row]:
        """One row for each system, against the one called ``single``."""
        from lightning_longctx.cli.bench.attention_systems import attention_systems
        from lightning_longctx.cli.bench.rows import Row, efficiency

        case, single = self.case(), measured["single"].seconds_median
        return [
            Row(
                case="attention",
                system=system.name,
                ranks=system.num_ranks(case),
                tokens=case.tokens,
                heads=case.heads,
                kv_heads=case.kv_heads,
                width=case.width,
                dtype=case.dtype,
                mask=case.mask,
                **system.describe(case),
                seconds_median=(result := measured[system.name]).seconds_median,
                seconds_single=single,
                efficiency=efficiency(result.seconds_median, single, system.num_ranks(case), cores),
                bytes_sent_mean=result.bytes_sent_mean,
                bytes_sent_max=result.bytes_sent_max,
                bytes_outer_max=result.bytes_outer_max,
                peak_growth_bytes=result.peak_growth,
            )
            for system in attention_systems()
        ]
