"""Which ranks of a cluster form rings and which share heads: every arrangement is simulated, the fastest is taken."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.plan.simulate import Estimate, estimate_attention
from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.layout import LayoutName
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.topology.degrees import Degrees, Placement


@dataclass(frozen=True)
class Arrangement:
    """One way to use all ranks of a cluster for one sequence.

    Args:
        name: In words.
        degrees: The options that give it.
        estimate: What it costs; None if it cannot run.
        refusal: Why it cannot run; empty if it can.
        is_chosen: The fastest.
    """

    name: str
    degrees: Degrees
    estimate: Estimate | None
    refusal: str = ""
    is_chosen: bool = False


def choose_arrangement(
    num_nodes: int,
    ranks_per_node: int,
    tokens: int,
    shape: AttentionShape = AttentionShape(),  # noqa: B008  frozen
    mask: Mask = CAUSAL,
    communication: Communication = Communication(),  # noqa: B008  frozen
    layout: LayoutName = "zigzag",
    documents: Documents = (),
) -> Degrees:
    """Degrees of the fastest arrangement; arguments as in ``explain_arrangements``."""
    rows = explain_arrangements(num_nodes, ranks_per_node, tokens, shape, mask, communication, layout, documents)
    return next(row.degrees for row in rows if row.is_chosen)


def explain_arrangements(
    num_nodes: int,
    ranks_per_node: int,
    tokens: int,
    shape: AttentionShape = AttentionShape(),  # noqa: B008  frozen
    mask: Mask = CAUSAL,
    communication: Communication = Communication(),  # noqa: B008  frozen
    layout: LayoutName = "zigzag",
    documents: Documents = (),
) -> list[Arrangement]:
    """Simulate each arrangement of ``num_nodes * ranks_per_node`` ranks that share one sequence.

    Args:
        num_nodes: M.
        ranks_per_node: W.
        tokens: Length of the sequence.
        shape: Heads and sizes of attention.
        mask: Who may see whom.
        communication: How keys and values travel in rings, and over which links.
        layout: Of the context ranks.
        documents: Cumulative lengths of packed documents; empty is one.

    Returns:
        The double ring, then those that share heads; exactly one is chosen. A ring on one node and heads on one node
        are what remains of them for ``num_nodes=1``.
    """
    rows = []
    for name, degrees, heads_per_node in _arrangements(num_nodes, ranks_per_node):
        estimate, refusal = None, _refusal(degrees, shape)
        if not refusal:
            record = SequenceRecord(
                tokens, layout, degrees.context, degrees.inner, head=degrees.head, documents=documents
            )
            estimate = estimate_attention(record, shape, mask, communication, heads_per_node)
        rows.append(Arrangement(name, degrees, estimate, refusal))
    best = min((row for row in rows if row.estimate), key=lambda row: row.estimate.seconds)  # type: ignore[union-attr]
    return [Arrangement(row.name, row.degrees, row.estimate, row.refusal, row is best) for row in rows]


def _arrangements(num_nodes: int, ranks_per_node: int) -> list[tuple[str, Degrees, int]]:
    """Name, degrees, and how many ranks of a head group are on one node."""
    num_ranks = num_nodes * ranks_per_node

    def degrees(context: int, inner: int, head: int = 1, placement: Placement = "head_first") -> Degrees:
        return Degrees(data=1, context=context, inner_ring=inner, head=head, placement=placement)

    ring = "double ring" if num_nodes > 1 and ranks_per_node > 1 else "ring"
    found = [(ring, degrees(num_ranks, ranks_per_node), 1)]
    if num_nodes > 1 and ranks_per_node > 1:
        inside = degrees(num_nodes, 1, ranks_per_node)
        across = degrees(ranks_per_node, ranks_per_node, num_nodes, "context_first")
        found += [("heads inside nodes, ring across", inside, ranks_per_node)]
        found += [("heads across nodes, ring inside", across, 1)]
    if num_ranks > 1:
        found.append(("heads alone", degrees(1, 1, num_ranks), ranks_per_node))
    return found


def _refusal(degrees: Degrees, shape: AttentionShape) -> str:
    try:
        degrees.check_heads(shape.heads, shape.kv_heads)
    except ValueError as problem:
        return str(problem)
    return ""
