"""``bench attention``: its options, and the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from lightning_longctx.cli.bench.masks import parse_mask
from lightning_longctx.cli.bench.rows import check_csv
from lightning_longctx.sequence.layout import LayoutName
from lightning_longctx.topology.links import Links

if TYPE_CHECKING:
    from lightning_longctx.cli.bench.attention_case import AttentionCase
    from lightning_longctx.cli.bench.measure import Measured
    from lightning_longctx.cli.bench.rows import Row
    from lightning_longctx.cli.bench.systems import System

LINKS = Links(inner_gbits=16.0, outer_gbits=2.0, teraflops=0.1, latency_us=100.0)
"""What ``auto`` counts with: about what a core and gloo's loopback do, and other inner rings as if they were far."""

_POSITIVE = ("ranks", "tokens", "heads", "kv_heads", "width", "head", "repeats", "warmup")


@dataclass(frozen=True)
class AttentionBench:
    """Time attention, forward and backward, spread over processes against one process.

    Starts --ranks processes of one thread each. First every system has to compute what plain attention gives, at about
    256 tokens; otherwise nothing is timed. Then the systems run in turn, so that a machine that gets slower does so for
    all of them. `single` is one process with PyTorch's own flash attention, `longctx` is this package, and `longctx-1`
    is this package on one rank (where the mask has windows or documents).

    Args:
        ranks: Processes that share the sequence. More than the machine has cores take turns; efficiency then divides
            by the cores.
        tokens: Length of the whole sequence. Need not divide by the ranks.
        heads: Query heads.
        kv_heads: Key/value heads, which query heads share in groups; must divide heads. null is as many as heads.
        width: Width of one head.
        dtype: Of queries, keys and values.
        mask: Who may see whom: causal, full, window:W (causal, the latest W keys) or documents:MEAN (causal within
            packed documents, whose lengths are exponential with this mean; always the same ones).
        layout: Which tokens a rank holds. auto counts which is the fastest.
        inner_ring: Ranks of one inner ring; must divide ranks / head. null is one flat ring.
        head: Ranks that exchange heads (Ulysses); must divide ranks. The others of them form the ring.
        placement: Whether the head ranks or those of the ring are neighbours; only head > 1 can tell.
        schedule: How keys and values travel; auto counts which of the others is the fastest.
        keep_kv: Keep keys and values that came from other inner rings until backward.
        communication_dtype: What is sent is rounded to this. null sends keys and values as they are.
        shared_memory: Whether ranks read messages out of each other's memory, or send them through sockets.
        backend: What computes one tile; auto takes the fastest that can.
        peers: Also run other packages that do the same, those that are installed. They compute with PyTorch's own CPU
            operation in place of flash-attn, so schedules are compared, not kernels. One that fails the check is not
            timed, the others are.
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
    mask: str = "causal"
    layout: Literal["auto", "contiguous", "zigzag", "striped", "document_zigzag", "balanced"] = "auto"
    inner_ring: int | None = None
    head: int = 1
    placement: Literal["head_first", "context_first"] = "head_first"
    schedule: Literal["auto", "double_ring", "direct", "all_gather"] = "auto"
    keep_kv: bool = False
    communication_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    shared_memory: bool = True
    backend: str = "auto"
    peers: bool = False
    repeats: int = 5
    warmup: int = 2
    csv: str | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        parse_mask(self.mask)
        self._check_sizes()
        check_csv(self.csv)

    def _check_sizes(self) -> None:
        import torch

        from lightning_longctx.attention.backends import Needs, choose_backend
        from lightning_longctx.topology.degrees import divisors

        if self.heads % (self.kv_heads or self.heads):
            allowed = " or ".join(map(str, divisors(self.heads)))
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}. Use kv_heads={allowed}.")
        if self.tokens < 2 * self.ranks:
            raise ValueError(f"tokens={self.tokens} are too few for ranks={self.ranks}: use {2 * self.ranks} or more.")
        if self.ranks % self.head:
            allowed = " or ".join(map(str, divisors(self.ranks)))
            raise ValueError(f"head={self.head} does not divide ranks={self.ranks}. Use head={allowed}.")
        if self.head > 1 and self.tokens % self.ranks:
            fitting = self.tokens // self.ranks * self.ranks
            raise ValueError(
                f"tokens={self.tokens} must divide by ranks={self.ranks} where heads are exchanged (head={self.head}). "
                f"Use tokens={fitting}, or head=1."
            )
        self.case().degrees.check_heads(self.heads, self.kv_heads or self.heads)
        choose_backend(self.backend, Needs(torch.device("cpu"), getattr(torch, self.dtype), self.width))

    def case(self) -> AttentionCase:
        """What every system computes."""
        from lightning_longctx.cli.bench.attention_case import AttentionCase
        from lightning_longctx.plan.communication import Communication

        case = AttentionCase(
            ranks=self.ranks,
            tokens=self.tokens,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            width=self.width,
            dtype=self.dtype,
            mask=str(parse_mask(self.mask)),
            layout="zigzag" if self.layout == "auto" else self.layout,
            inner_ring=self.inner_ring,
            backend=self.backend,
            head=self.head,
            placement=self.placement,
            communication=Communication(
                self.schedule, self.keep_kv, self.communication_dtype, LINKS, self.shared_memory
            ),
        )
        return replace(case, layout=fastest_layout(case)) if self.layout == "auto" else case

    def run(self) -> None:
        """Measure, write the CSV file and print the table; progress goes to stderr.

        Raises:
            WrongResultError: A system of ours does not compute plain attention.
        """
        from rich.console import Console

        from lightning_longctx.cli.bench.attention_systems import attention_systems
        from lightning_longctx.cli.bench.measure import measure, num_stages
        from lightning_longctx.cli.bench.peers import admitted_peers
        from lightning_longctx.cli.bench.progress import stages
        from lightning_longctx.cli.bench.report import report
        from lightning_longctx.cli.bench.rows import keep, num_cores
        from lightning_longctx.cli.bench.single_process import SingleProcess

        case, cores = self.case(), num_cores()
        admitted, absent = admitted_peers(case) if self.peers else ((), {})
        systems = (*attention_systems(case), *admitted)
        with stages(num_stages(systems, self.repeats, self.warmup)) as advance:
            measured = measure(systems, case, self.ranks, self.repeats, self.warmup, advance)
        measured["single"] = scaled(measured["single"], SingleProcess().scale(case))
        rows = self.rows(systems, measured, cores)
        # Names of peers are long: rather let a narrow terminal break lines than cut figures off.
        report(Console(width=max(Console().width, 110)), self.title, rows, measured, cores)
        for line in notes(case, measured, absent, cores):
            print(line)
        keep(self.csv, rows)

    @property
    def title(self) -> str:
        """What was computed, in words."""
        case = self.case()
        grouped = f" ({case.kv_heads} for keys and values)" if case.kv_heads != case.heads else ""
        heads = f"{case.heads} heads{grouped} of width {case.width}"
        windows, inner = case.degrees.windows, case.degrees.inner
        ring = f"{windows}x{inner} ring" if windows > 1 else f"ring of {inner}"
        spread = f"{ring}, head={case.head} {case.placement}" if case.head > 1 else ring
        return f"{case.mask} attention, {case.tokens:,} tokens, {heads}, {case.dtype}, {case.layout}, {spread}"

    def rows(self, systems: Sequence[System], measured: dict[str, Measured], cores: int) -> list[Row]:
        """One row for each system, against the one called ``single``."""
        from lightning_longctx.cli.bench.rows import row_of

        case = self.case()
        return [row_of("attention", system, case, measured, cores) for system in systems]


def fastest_layout(case: AttentionCase) -> LayoutName:
    """What ``layout=auto`` takes, counted for processes of one thread on one machine."""
    from lightning_longctx.plan.layouts import choose_layout

    where = (case.tokens, case.degrees.context, case.degrees.inner)
    return choose_layout(
        *where, case.documents, masks=(case.visible.mask,), head=case.head, links=LINKS, shape=case.shape
    )


def scaled(measured: Measured, factor: float) -> Measured:
    """A yardstick that had to compute more than is visible, charged for what is."""
    return replace(
        measured,
        seconds=tuple(seconds * factor for seconds in measured.seconds),
        core_seconds=tuple(seconds * factor for seconds in measured.core_seconds),
    )


def notes(case: AttentionCase, measured: dict[str, Measured], absent: dict[str, str], cores: int) -> list[str]:
    """What to know about this mask and these peers, below the table."""
    from lightning_longctx.cli.bench.rows import efficiency

    lines = []
    if case.visible.kind == "window":
        share = case.visible.visible_pairs(case.tokens) / replace(case, mask="causal").visible.visible_pairs(
            case.tokens
        )
        lines.append(
            f"single      plain causal attention, its time multiplied by {share:.4f}, the share of pairs that the "
            "window shows: PyTorch has no fast windowed operation on CPU"
        )
    if case.visible.kind == "documents":
        lines.append(
            f"single      PyTorch's own operation on each of the {len(case.documents) - 1} documents by itself"
        )
    if "longctx-1" in measured:
        own = measured["longctx-1"].seconds_median
        found = efficiency(measured["longctx"].seconds_median, own, case.ranks, cores)
        lines.append(f"longctx-1   this package on one rank; against it, longctx has an efficiency of {found:.3f}")
    if absent:
        lines += ["Not timed:", *(f"  {name}: {reason}" for name, reason in absent.items())]
    return lines
