"""Which ways to arrange ranks on nodes ``bench ring`` compares, and which of them fit the heads."""

from __future__ import annotations

from lightning_longctx.topology.degrees import Degrees, check_head_degree
from lightning_longctx.topology.links import Links

HEAD_DEGREES = ("head_inside", "head_across", "head_all")
ROWS = ("flat", "double", "keep_kv", *HEAD_DEGREES, "auto")
"""What ``--systems`` can name; ``single`` always runs."""

# What the plan chooses with; rough, since only ratios count. PyTorch's CPU flash attention in float32 reaches about
# 0.08 teraflops on a core; what is sent and received is copied by the same cores, through the kernel.
_CORE_TERAFLOPS = 0.08
_INNER_GBITS = 8.0
_LATENCY_US = 100.0
_CORE_COPY_GBITS = 14.0


def emulated_links(nic_mbit: float, ranks_per_nic: int, num_ranks: int, cores: int) -> Links:
    """Speeds of one rank of an emulated cluster whose ranks share ``cores``."""
    share = min(1.0, cores / num_ranks)
    return Links(
        inner_gbits=_INNER_GBITS,
        outer_gbits=nic_mbit / 1000 / ranks_per_nic,
        teraflops=_CORE_TERAFLOPS * share,
        latency_us=_LATENCY_US,
        copy_gbits=_CORE_COPY_GBITS * share,
    )


def degrees_of(row: str, num_nodes: int, ranks_per_node: int) -> Degrees:
    """Degrees of a row of this package: a double ring, heads on one kind of link and a ring on the other, or heads.

    ``auto`` stands for any of them.
    """
    if row == "head_inside":
        return Degrees(data=1, context=num_nodes, inner_ring=1, head=ranks_per_node, placement="head_first")
    if row == "head_across":
        return Degrees(data=1, context=ranks_per_node, head=num_nodes, placement="context_first")
    if row == "head_all":
        return Degrees(data=1, head=num_nodes * ranks_per_node)
    return Degrees(data=1, context=num_nodes * ranks_per_node, inner_ring=ranks_per_node)


def choose_rows(named: str | None, num_nodes: int, ranks_per_node: int, heads: int, kv_heads: int) -> tuple[str, ...]:
    """Rows to time, in the order of ``ROWS``.

    Args:
        named: Names with commas between them. None: all that fit.
        num_nodes: Nodes.
        ranks_per_node: Ranks on each.
        heads: Query heads.
        kv_heads: Key/value heads.

    Raises:
        ValueError: An unknown name, or one that the heads do not fit.
    """
    degrees = {row: degrees_of(row, num_nodes, ranks_per_node) for row in ROWS}
    if named is None:
        return tuple(row for row in ROWS if _differs(row, degrees[row]) and _fits(degrees[row], heads, kv_heads))
    chosen = named.split(",")
    if unknown := [row for row in chosen if row not in ROWS]:
        raise ValueError(f"systems={named} names {unknown}. Choose from {','.join(ROWS)}.")
    for row in chosen:
        try:
            degrees[row].check_heads(heads, kv_heads)
        except ValueError as problem:
            raise ValueError(f"systems={named}: {row} needs {problem}") from problem
    return tuple(row for row in ROWS if row in chosen)


def _differs(row: str, degrees: Degrees) -> bool:
    """Whether the row is no other row by another name."""
    return row not in HEAD_DEGREES or degrees.head > 1 and (degrees.context > 1 or row == "head_all")


def _fits(degrees: Degrees, heads: int, kv_heads: int) -> bool:
    try:
        check_head_degree("head", degrees.head, heads, kv_heads, replicate=True)
    except ValueError:
        return False
    return True
