"""``bench kernels``: its options, and the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from lightning_longctx.cli.bench.masks import parse_mask
from lightning_longctx.cli.bench.rows import spread

if TYPE_CHECKING:
    from lightning_longctx.cli.bench.attention_case import AttentionCase
    from lightning_longctx.cli.bench.kernel_systems import Timed

_POSITIVE = ("tokens", "heads", "kv_heads", "width", "repeats", "warmup")
_HEADINGS = ("system", "forward", "TFLOP/s", "forward + backward", "TFLOP/s", "spread")


@dataclass(frozen=True)
class KernelBench:
    """Time what computes attention on one GPU: our Triton kernels, flash-attn, PyTorch's flash attention.

    First every system has to compute what plain attention gives, at about 256 tokens; one that does not is an error.
    Then the systems run in turn. `torch` is F.scaled_dot_product_attention with PyTorch's flash attention, where it
    knows the mask; the others are this package on one rank, with each backend that can compute the case.

    Args:
        tokens: Length of the sequence.
        heads: Query heads.
        kv_heads: Key/value heads, which query heads share in groups; must divide heads. null is as many as heads.
        width: Width of one head.
        dtype: Of queries, keys and values.
        mask: Who may see whom: causal, full, window:W (causal, the latest W keys) or documents:MEAN (causal within
            packed documents, whose lengths are exponential with this mean; always the same ones).
        tune: First search the block sizes of the Triton kernels on this case, and use the fastest.
        device: cpu is for a look at the check alone: under TRITON_INTERPRET=1, with few tokens. Its times mean nothing.
        repeats: Timed runs of each system; the median counts.
        warmup: Runs of each system before those; the first one compiles.

    Raises:
        ValueError: An option does not fit the others or this machine; the message names it.
    """

    tokens: int = 16384
    heads: int = 32
    kv_heads: int | None = None
    width: int = 128
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "bfloat16"
    mask: str = "causal"
    tune: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    repeats: int = 20
    warmup: int = 3

    def __post_init__(self) -> None:
        import torch

        from lightning_longctx.topology.degrees import divisors

        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        parse_mask(self.mask)
        if self.heads % (self.kv_heads or self.heads):
            allowed = " or ".join(map(str, divisors(self.heads)))
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}. Use kv_heads={allowed}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "device=cuda: PyTorch finds no CUDA GPU here. Use device=cpu with few tokens under TRITON_INTERPRET=1 "
                "to see the check alone."
            )
        if self.tune and self.device == "cpu":
            raise ValueError("tune=True needs device=cuda: in the interpreter there is nothing to choose.")

    def case(self) -> AttentionCase:
        """What every system computes."""
        from lightning_longctx.cli.bench.attention_case import AttentionCase

        sizes = (1, self.tokens, self.heads, self.kv_heads or self.heads, self.width)
        return AttentionCase(*sizes, self.dtype, str(parse_mask(self.mask)), "contiguous")

    def run(self) -> None:
        """Check, tune if asked to, measure, and print the table.

        Raises:
            WrongResultError: A system does not compute plain attention.
        """
        from rich.console import Console

        from lightning_longctx.cli.bench.gate import errors, refuse_wrong
        from lightning_longctx.cli.bench.kernel_systems import kernel_systems, timed_in_turn
        from lightning_longctx.cli.bench.kernel_tuning import tuned

        case = self.case()
        systems, absent = kernel_systems(case, self.device)
        for system in systems:
            refuse_wrong(system.name, [errors(system.job(case.small()), case.small())], case.small())
        if self.tune:
            for line in tuned(case, self.repeats):
                print(line)
        timed = timed_in_turn(systems, case, self.repeats, self.warmup)
        report(Console(width=max(Console().width, 110)), self.title, case, timed)
        for name, reason in absent.items():
            print(f"not timed   {name}: {reason}")

    @property
    def title(self) -> str:
        """What was computed, in words."""
        case = self.case()
        grouped = f" ({case.kv_heads} for keys and values)" if case.kv_heads != case.heads else ""
        heads = f"{case.heads} heads{grouped} of width {case.width}"
        return f"{case.mask} attention, {case.tokens:,} tokens, {heads}, {case.dtype}, {self.device}"


def report(console: object, title: str, case: AttentionCase, timed: Sequence[Timed]) -> None:
    """Print what came out.

    Args:
        console: Of rich, where to.
        title: What was computed.
        case: The same as numbers.
        timed: What every system took.
    """
    from rich.table import Table

    from lightning_longctx.cli.bench.report import duration

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for each in timed:
        cells = [each.name]
        for seconds, work in ((each.forward, 1.0), (each.both, 3.5)):
            cells += [duration(median(seconds)), f"{work * forward_flops(case) / median(seconds) / 1e12:.3g}"]
        table.add_row(*cells, f"{spread(each.both):.0%}")
    console.print(table)  # type: ignore[attr-defined]
    print(
        f"median of {len(timed[0].both)} runs; spread: slowest run over fastest, minus 1\n"
        "TFLOP/s counts visible pairs: 4 * width for each in forward, 2.5 times that in backward (FlashAttention-2)"
    )


def forward_flops(case: AttentionCase) -> float:
    """Multiplications and additions of both products over visible pairs, all heads."""
    return 4.0 * case.width * case.heads * case.visible.visible_pairs(case.tokens)
