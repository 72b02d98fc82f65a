"""Sizes of attention that turn counts of pairs and tokens into seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_longctx.topology.links import Links

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10
"""Per visible pair, head and unit of width: two matrix products forward, five backward."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes that turn pairs into operations and tokens into bytes.

    Args:
        heads: Query heads.
        kv_heads: Key/value heads.
        width: Of one head.
        item_size: Bytes of a number in queries, keys, values and outputs.
        gradient_size: Bytes of a number in sums of gradients.
        batch: Rows.
    """

    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    item_size: int = 2
    gradient_size: int = 4
    batch: int = 1

    @property
    def key_bytes(self) -> int:
        """Of one token's keys and values."""
        return 2 * self.batch * self.kv_heads * self.width * self.item_size

    @property
    def gradient_bytes(self) -> int:
        """Of one token's key and value gradients on their way."""
        return 2 * self.batch * self.kv_heads * self.width * self.gradient_size

    def seconds_per_pair(self, links: Links, flops: int = FORWARD_FLOPS + BACKWARD_FLOPS) -> float:
        """Of all heads and rows."""
        return flops * self.batch * self.heads * self.width / (links.teraflops * 1e12)

    def per_head_rank(self, head: int) -> AttentionShape:
        """What is left on each of ``head`` ranks; key/value heads that are too few are replicated."""
        return replace(self, heads=max(1, self.heads // head), kv_heads=max(1, self.kv_heads // head))
