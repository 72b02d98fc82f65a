"""What a plan costs, counted before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lightning_longctx.plan.schedules import DoubleRing, Hop
from lightning_longctx.sequence.layout import Ranges


def hop_tokens(hop: Hop, shards: tuple[Ranges, ...]) -> int:
    """Tokens whose keys and values (or their gradients) one message carries."""
    return sum(len(shards[hop.home][piece]) for piece in hop.pieces)


def sent_bytes(
    hops: Iterable[Hop], shards: tuple[Ranges, ...], inner: int, *, key_bytes: int, gradient_bytes: int
) -> Counter[str]:
    """Bytes by link, ``inner`` (inside an inner ring) or ``outer`` (between them).

    Args:
        hops: What is sent, e.g. ``Schedule.sent`` of one rank's two passes.
        shards: Every rank's ranges.
        inner: Ranks in an inner ring.
        key_bytes: Bytes of one token's keys and values: 2 x batch x key/value heads x head width x item size.
        gradient_bytes: Bytes of one token's key and value gradients (accumulators are wider than bfloat16 keys).
    """
    total: Counter[str] = Counter()
    for hop in hops:
        link = "inner" if hop.source // inner == hop.target // inner else "outer"
        total[link] += hop_tokens(hop, shards) * (gradient_bytes if hop.channel.startswith("grad") else key_bytes)
    return total


def ring_tokens(ring: DoubleRing, shards: tuple[Ranges, ...]) -> int:
    """Tokens sent by all ranks in one forward and one backward pass, gradients counted like keys."""
    tables = (ring.forward_keys, ring.backward_keys, ring.gradients)
    return sum(hop_tokens(timed.hop, shards) for table in tables for timed in table)
