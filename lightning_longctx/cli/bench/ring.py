"""``bench ring``: its options, and the run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_longctx.cli.bench.attention import AttentionBench
from lightning_longctx.cli.bench.ring_arrangements import choose_rows, degrees_of, emulated_links
from lightning_longctx.plan.arrange import choose_arrangement
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.topology.degrees import Degrees

if TYPE_CHECKING:
    from lightning_longctx.cli.bench.attention_systems import AttentionCase
    from lightning_longctx.cli.bench.measure import Measured
    from lightning_longctx.cli.bench.rows import Row
    from lightning_longctx.cli.bench.systems import System
    from lightning_longctx.testing.cluster import Cluster


@dataclass(frozen=True)
class RingBench:
    """Time causal attention, forward and backward, on an emulated cluster: fast links inside nodes, slow ones between.

    Needs root on Linux. Every rank is a process of one thread with a network card of its own, of --nic_mbit; ranks of a
    node reach each other as fast as memory. First every system has to compute what plain attention gives, at about 256
    tokens; otherwise nothing is timed. Then the systems run in turn:

    `single` one process with PyTorch's own flash attention, without a network; `flat` one ring over all ranks in which
    every block visits every rank; `double` this package's ring of rings, one inner ring a node, which sends what is
    needed; `keep_kv` the same, keeping what came from other nodes until backward; `head_inside` heads shared inside
    nodes, a ring across; `head_across` heads shared across nodes, rings inside; `head_all` heads shared by all; `auto`
    that of these which the plan expects to be the fastest.

    Args:
        nodes: Emulated nodes; at least 2.
        ranks_per_node: Processes on each; at most 16 in all.
        nic_mbit: Rate of a network card, each way, in Mbit per second.
        shared_nic: Whether the ranks of a node share one network card.
        tokens: Length of the whole sequence; a multiple of twice the ranks.
        heads: Query heads.
        kv_heads: Key/value heads, which query heads share in groups; must divide heads. null is as many as heads.
        width: Width of one head.
        dtype: Of queries, keys and values.
        schedule: How this package's rings pass keys and values on; auto counts which is fastest.
        keep_kv: Whether all of this package's rings keep what came from other nodes until backward.
        communication_dtype: What this package's rings round to before sending. null sends as it is.
        shared_memory: Whether ranks of a node read messages out of each other's memory, or send them over the cable.
        systems: Which to run, with commas between: flat,double,keep_kv,head_inside,head_across,head_all,auto. null
            runs all that fit the heads.
        repeats: Timed runs of each system; the median counts.
        warmup: Runs of each system before those; memory is measured in the last of them.
        csv: File for one row a system, replaced if it exists. null writes none.

    Raises:
        ValueError: An option does not fit the others; the message names it.
    """

    nodes: int = 2
    ranks_per_node: int = 4
    nic_mbit: float = 100.0
    shared_nic: bool = False
    tokens: int = 4096
    heads: int = 8
    kv_heads: int | None = None
    width: int = 64
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    schedule: Literal["auto", "double_ring", "direct", "all_gather"] = "double_ring"
    keep_kv: bool = False
    communication_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    shared_memory: bool = True
    systems: str | None = None
    repeats: int = 9
    warmup: int = 2
    csv: str | None = None

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ValueError(f"nodes={self.nodes} has no links between nodes: use 2 or more.")
        self.cluster()
        self._attention()
        if self.tokens % (2 * self.num_ranks):
            raise ValueError(
                f"tokens={self.tokens} does not divide into two equal parts for each of {self.num_ranks} ranks, which "
                f"zigzag rings without padding need. Use a multiple of {2 * self.num_ranks}."
            )
        self._rows()

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def cluster(self) -> Cluster:
        """Where the ranks run, not yet made."""
        from lightning_longctx.testing.cluster import Cluster

        return Cluster(self.nodes, self.ranks_per_node, self.nic_mbit, self.shared_nic)

    def case(self) -> AttentionCase:
        """What every system computes."""
        return self._attention().case()

    def compared(self) -> tuple[System, ...]:
        """What runs; ``single`` comes first, since the others are measured against it."""
        from lightning_longctx.cli.bench.attention_systems import SingleProcess
        from lightning_longctx.cli.bench.ring_systems import Arrangement, FlatZigzag

        systems: list[System] = [SingleProcess()]
        for row in self._rows():
            if row == "flat":
                systems.append(FlatZigzag(self.ranks_per_node))
            else:
                systems.append(Arrangement(row, self._degrees(row), self._communication(row), self.ranks_per_node))
        return tuple(systems)

    def run(self) -> None:
        """Measure, write the CSV file and print the table; progress goes to stderr.

        Raises:
            ClusterUnavailableError: This machine cannot emulate a cluster.
            WrongResultError: A system does not compute plain attention.
        """
        from rich.console import Console

        from lightning_longctx.cli.bench.measure import measure, num_stages
        from lightning_longctx.cli.bench.progress import stages
        from lightning_longctx.cli.bench.ring_report import report
        from lightning_longctx.cli.bench.rows import keep, num_cores

        systems, case = self.compared(), self.case()
        with _removed_when_terminated(), self.cluster() as cluster:
            with stages(num_stages(systems, self.repeats, self.warmup)) as advance:
                measured = measure(systems, case, case.ranks, self.repeats, self.warmup, advance, cluster.places)
        rows = self.rows(systems, measured, num_cores())
        report(Console(), self.title, rows, measured, self.ranks_per_node if self.shared_nic else 1)
        if "auto" in measured:
            print(f"\nauto chose {in_words(self._degrees('auto'))}.")
        keep(self.csv, rows)

    @property
    def title(self) -> str:
        """What was computed where, in words."""
        case = self.case()
        grouped = f" ({case.kv_heads} for keys and values)" if case.kv_heads != case.heads else ""
        cards = "one network card a node" if self.shared_nic else "one network card a rank"
        heads = f"{case.heads} heads{grouped} of width {case.width}"
        return (
            f"causal attention, {case.tokens:,} tokens, {heads}, {case.dtype}; "
            f"{self.nodes} nodes x {self.ranks_per_node} ranks, {cards} of {self.nic_mbit:g} Mbit/s"
        )

    def rows(self, systems: tuple[System, ...], measured: dict[str, Measured], cores: int) -> list[Row]:
        """One row for each system, against the one called ``single``."""
        from lightning_longctx.cli.bench.rows import row_of

        case = self.case()
        return [row_of("ring", system, case, measured, cores) for system in systems]

    def _attention(self) -> AttentionBench:
        return AttentionBench(
            ranks=self.num_ranks,
            tokens=self.tokens,
            heads=self.heads,
            kv_heads=self.kv_heads,
            width=self.width,
            dtype=self.dtype,
            layout="zigzag",
            inner_ring=self.ranks_per_node,
            communication_dtype=self.communication_dtype,
            shared_memory=self.shared_memory,
            repeats=self.repeats,
            warmup=self.warmup,
            csv=self.csv,
        )

    def _communication(self, row: str) -> Communication:
        from lightning_longctx.cli.bench.rows import num_cores

        ranks_per_nic = self.ranks_per_node if self.shared_nic else 1
        links = emulated_links(self.nic_mbit, ranks_per_nic, self.num_ranks, num_cores())
        keep_kv = self.keep_kv or row == "keep_kv"
        return Communication(self.schedule, keep_kv, self.communication_dtype, links, self.shared_memory)

    def _degrees(self, row: str) -> Degrees:
        if row != "auto":
            return degrees_of(row, self.nodes, self.ranks_per_node)
        import torch

        size = getattr(torch, self.dtype).itemsize
        shape = AttentionShape(self.heads, self.kv_heads or self.heads, self.width, size, gradient_size=max(4, size))
        communication = self._communication(row)
        return choose_arrangement(self.nodes, self.ranks_per_node, self.tokens, shape, communication=communication)

    def _rows(self) -> tuple[str, ...]:
        rows = choose_rows(self.systems, self.nodes, self.ranks_per_node, self.heads, self.kv_heads or self.heads)
        # With the option keep_kv, double keeps them too: the row would be the same.
        return tuple(row for row in rows if not (row == "keep_kv" and self.keep_kv and self.systems is None))


def in_words(degrees: Degrees) -> str:
    """Degrees as the strategy's options."""
    placement = f" placement={degrees.placement}" if degrees.head > 1 < degrees.context else ""
    return f"context={degrees.context} inner_ring={degrees.inner} head={degrees.head}{placement}"


@contextmanager
def _removed_when_terminated() -> Iterator[None]:
    """Let ``kill`` and ``timeout`` end the command as Ctrl-C does, so that the cluster is removed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
