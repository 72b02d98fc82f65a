"""Ways to spread causal attention over the ranks of several nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from lightning_longctx.cli.bench.attention_case import AttentionCase, forward_backward, take
from lightning_longctx.cli.bench.attention_systems import PATIENCE, LongContext
from lightning_longctx.cli.bench.flat_zigzag import FlatRing, FlatZigzagAttention, Rotation
from lightning_longctx.cli.bench.systems import Job
from lightning_longctx.plan.communication import Communication
from lightning_longctx.sequence.layout import layout_ranges
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.neighbours import group_of


@dataclass(frozen=True)
class FlatZigzag:
    """One flat ring over all ranks that sends everything everywhere; see ``flat_zigzag``.

    Args:
        ranks_per_node: Ranks whose links are fast.
    """

    ranks_per_node: int
    name: str = "flat"

    def num_ranks(self, case: AttentionCase) -> int:
        """All."""
        return case.ranks

    def describe(self, case: AttentionCase) -> dict[str, str]:
        """See ``System.describe``."""
        return {"layout": "zigzag", "schedule": self.name}

    def setup(self, case: AttentionCase, rank: int) -> Job:
        """See ``System.setup``."""
        group: dist.ProcessGroup = dist.new_group(list(range(case.ranks)), timeout=PATIENCE)  # type: ignore[assignment]
        successor = (rank + 1) % case.ranks
        link = "inner" if successor // self.ranks_per_node == rank // self.ranks_per_node else "outer"
        sent: Counter[str] = Counter()
        ring = FlatRing(rank, case.ranks, Rotation(group, link, sent), Rotation(group, link, sent))
        ranges = layout_ranges("zigzag", case.tokens, case.ranks)[rank]
        *leaves, grad = case.inputs(lambda whole: take(whole, ranges))

        def run() -> dict[str, Tensor]:
            return forward_backward(lambda *qkv: FlatZigzagAttention.apply(*qkv, ring), leaves, grad)

        return Job(
            run, lambda whole: take(whole, ranges), lambda: Counter(sent), lambda: dist.destroy_process_group(group)
        )


@dataclass(frozen=True)
class Arrangement:
    """This package, with its ranks arranged in one of the ways that degrees allow.

    Args:
        name: As the columns ``system`` and ``schedule`` have it.
        degrees: Of all ranks, for one sequence.
        communication: How keys and values travel.
        ranks_per_node: Ranks whose links are fast.
    """

    name: str
    degrees: Degrees
    communication: Communication
    ranks_per_node: int

    def num_ranks(self, case: AttentionCase) -> int:
        """All."""
        return case.ranks

    def describe(self, case: AttentionCase) -> dict[str, str]:
        """See ``System.describe``."""
        return {"layout": case.layout, "schedule": self.name}

    def setup(self, case: AttentionCase, rank: int) -> Job:
        """See ``System.setup``."""
        arranged = replace(
            case,
            inner_ring=self.degrees.inner_ring,
            head=self.degrees.head,
            placement=self.degrees.placement,
            communication=self.communication,
        )
        job = LongContext().setup(arranged, rank)
        heads = group_of(self.degrees, rank, "head")
        return replace(job, sent_bytes=lambda: by_link(job.sent_bytes(), heads, rank, self.ranks_per_node))


def by_link(sent: Mapping[str, int], heads: tuple[int, ...], rank: int, ranks_per_node: int) -> Counter[str]:
    """Count what head ranks exchange as sent between nodes, or inside one.

    Args:
        sent: Bytes by ``inner``, ``outer`` and ``head``.
        heads: Global ranks that share heads with ``rank``, which sends as much to each of the others.
        rank: The global rank.
        ranks_per_node: Ranks on a node.
    """
    exchanged = sent.get("head", 0)
    away = sum(peer // ranks_per_node != rank // ranks_per_node for peer in heads)
    outer = exchanged * away // max(1, len(heads) - 1)
    counted = {"inner": sent.get("inner", 0) + exchanged - outer, "outer": sent.get("outer", 0) + outer}
    return Counter({link: number for link, number in counted.items() if number})
