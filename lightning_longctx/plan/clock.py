"""A ring's message tables played on a clock: every rank's steps, every message, and who waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from lightning_longctx.plan.counts import hop_tokens, link_of
from lightning_longctx.plan.schedules import DoubleRing
from lightning_longctx.plan.shape import BACKWARD_FLOPS, FORWARD_FLOPS, AttentionShape
from lightning_longctx.plan.steps import Hop, Schedule, Step
from lightning_longctx.topology.links import Links

StepPairs = Callable[[DoubleRing, int, Step], int]
"""Visible (query, key) pairs of one rank of a ring in one step."""


class Played(NamedTuple):
    """One forward and one backward pass of all ranks.

    Args:
        seconds: Until the last rank is done.
        compute_seconds: Of the rank with the most work.
        outer_bytes: Most that any rank sends or receives between inner rings, whichever is more.
        sent_bytes: By all ranks, over any link.
    """

    seconds: float
    compute_seconds: float
    outer_bytes: int
    sent_bytes: int


def play(ring: DoubleRing, pairs: StepPairs, shape: AttentionShape, links: Links) -> Played:
    """Play both passes.

    Args:
        ring: The message tables.
        pairs: Work of each step.
        shape: What a rank of the ring computes and sends.
        links: Speeds. Inner links join an inner ring, outer ones inner rings; each is full duplex.
    """
    network, ranks, seconds = _Network(ring, shape, links), range(ring.windows * ring.inner), 0.0
    for backward in (False, True):
        schedules = [ring.schedule(rank, backward=backward) for rank in ranks]
        per_pair = shape.seconds_per_pair(links, BACKWARD_FLOPS if backward else FORWARD_FLOPS)
        work = [[per_pair * pairs(ring, rank, step) for step in schedules[rank].steps] for rank in ranks]
        seconds += _play_pass(schedules, work, network)
    most = max(sum(pairs(ring, rank, step) for step in schedules[rank].steps) for rank in ranks)
    outer = max((load for (link, *_), load in network.load.items() if link == "outer"), default=0)
    return Played(seconds, most * shape.seconds_per_pair(links), outer, network.sent_bytes)


class _Network:
    """Links on a clock: a rank sends one message at a time over each kind of link, and receives one at a time."""

    def __init__(self, ring: DoubleRing, shape: AttentionShape, links: Links) -> None:
        self._ring, self._shape, self._links = ring, shape, links
        self._free: defaultdict[tuple[str, str, int], float] = defaultdict(float)
        self.load: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self.sent_bytes = 0

    def restart(self) -> None:
        """All messages are through, and the clock starts again."""
        self._free.clear()

    def size(self, hop: Hop) -> int:
        """Bytes of a message."""
        token_bytes = self._shape.gradient_bytes if hop.is_gradient else self._shape.key_bytes
        return hop_tokens(hop, self._ring.parcels) * token_bytes

    def handle(self, hops: Iterable[Hop]) -> float:
        """Processor time of sending or receiving messages."""
        return sum(self._links.copy_seconds(self.size(hop)) for hop in hops)

    def carry(self, hop: Hop, posted: float) -> float:
        """When a message that both ends have posted is through."""
        link = link_of(hop, self._ring.inner)
        size = self.size(hop)
        gbits = self._links.inner_gbits if link == "inner" else self._links.outer_gbits
        ends = ((link, "sent", hop.source), (link, "received", hop.target))
        for end in ends:
            self._free[end] = max(self._free[end], posted) + size * 8e-9 / gbits
            self.load[end] += size
        self.sent_bytes += size
        return max(self._free[end] for end in ends) + self._links.latency_us * 1e-6


def _play_pass(schedules: Sequence[Schedule], work: Sequence[Sequence[float]], network: _Network) -> float:
    """All ranks, slot by slot: what is waited for in a slot was posted in an earlier one."""
    now, done, ready = [0.0] * len(schedules), dict[Hop, float](), dict[Hop, float]()
    network.restart()

    def post(posts: list[tuple[float, Hop]]) -> None:
        for posted, hop in sorted(posts):
            done[hop] = network.carry(hop, max(posted, ready[hop]))

    def wait(rank: int, hops: Sequence[Hop]) -> None:
        now[rank] = max([now[rank], *(done[hop] for hop in hops)]) + network.handle(hops)

    for index, steps in enumerate(zip(*(schedule.steps for schedule in schedules), strict=True)):
        for rank, step in enumerate(steps):
            if step.arrival and not step.is_kept:
                wait(rank, [step.arrival])
            ready.update(dict.fromkeys(step.receives, now[rank]))
        post([(now[rank], hop) for rank, step in enumerate(steps) for hop in step.sends])
        for rank, step in enumerate(steps):
            now[rank] += work[rank][index] + network.handle((*step.sends, *step.gradient_sends))
            wait(rank, step.accumulators)
        post([(now[rank], hop) for rank, step in enumerate(steps) for hop in step.gradient_sends])
    for rank, schedule in enumerate(schedules):
        wait(rank, schedule.returns)
        now[rank] = max([now[rank], *(done[hop] for hop in schedule.sent)])
    return max(now)
