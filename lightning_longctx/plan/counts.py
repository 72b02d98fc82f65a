"""What a plan costs, counted before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lightning_longctx.plan.parcels import Parcels
from lightning_longctx.plan.schedules import DoubleRing
from lightning_longctx.plan.steps import Hop


def hop_tokens(hop: Hop, parcels: Parcels) -> int:
    """Tokens whose keys and values (or their gradients) one message carries."""
    return sum(parcels[hop.home][p].num_tokens for p in hop.parcels)


def link_of(hop: Hop, inner: int) -> str:
    """``inner``: inside an inner ring; ``outer``: between them."""
    return "inner" if hop.source // inner == hop.target // inner else "outer"


def sent_bytes(
    hops: Iterable[Hop], parcels: Parcels, inner: int, *, key_bytes: int, gradient_bytes: int
) -> Counter[str]:
    """Bytes by link, ``inner`` (inside an inner ring) or ``outer`` (between them).

    Args:
        hops: What is sent, e.g. ``Schedule.sent`` of one rank's two passes.
        parcels: What they are made of.
        inner: Ranks in an inner ring.
        key_bytes: Bytes of one token's keys and values: 2 x batch x key/value heads x head width x item size.
        gradient_bytes: Bytes of one token's key and value gradients (accumulators are wider than bfloat16 keys).
    """
    total: Counter[str] = Counter()
    for hop in hops:
        total[link_of(hop, inner)] += hop_tokens(hop, parcels) * (gradient_bytes if hop.is_gradient else key_bytes)
    return total


def ring_hops(ring: DoubleRing) -> list[Hop]:
    """All messages of all ranks in one forward and one backward pass."""
    return [timed.hop for table in (ring.forward_keys, ring.backward_keys, ring.gradients) for timed in table]


def ring_tokens(ring: DoubleRing) -> int:
    """Tokens sent by all ranks in one forward and one backward pass, gradients counted like keys."""
    return sum(hop_tokens(hop, ring.parcels) for hop in ring_hops(ring))


def busiest_tokens(ring: DoubleRing) -> Counter[str]:
    """By link, the tokens that the busiest rank sends or receives, whichever is more, in both passes together."""
    loads: dict[str, Counter[tuple[int, str]]] = {"inner": Counter(), "outer": Counter()}
    for hop in ring_hops(ring):
        load, tokens = loads[link_of(hop, ring.inner)], hop_tokens(hop, ring.parcels)
        load[hop.source, "sent"] += tokens
        load[hop.target, "received"] += tokens
    return Counter({link: max(load.values(), default=0) for link, load in loads.items()})
