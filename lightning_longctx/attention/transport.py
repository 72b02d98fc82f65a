"""How messages travel between context ranks, and heads between head ranks: over process groups, or on one machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_longctx.attention.host_messages import HostMessages
from lightning_longctx.attention.peer_errors import PeerError, cause_of, place_of
from lightning_longctx.plan.counts import link_of
from lightning_longctx.plan.steps import CHANNELS, Channel, Hop

T = TypeVar("T")

_SMALL_BYTES = 1 << 20
_HEADS = len(CHANNELS)  # a channel of its own


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Block until the buffers may be read (receive) or reused (send)."""
        ...


class Sent(Pending, Protocol):
    """A message on its way from this rank."""

    def is_over(self, due: bool) -> bool:
        """Whether its tensors may be reused. ``due`` lets it block, which it does only where that holds up nobody."""
        ...


class Transport(Protocol):
    """Carries the hops of a schedule. Both calls return at once; callers post a step's receives before its sends."""

    sent_bytes: Counter[str]
    """Bytes sent so far by link (``inner`` or ``outer``); must equal ``plan.counts.sent_bytes``."""

    def small_bytes(self, peer: int) -> int:
        """Up to which size keys and values are joined for ``peer``: to post one more costs as much as to copy them."""
        ...

    def receive(self, hop: Hop, buffers: Sequence[Tensor]) -> Pending:
        """Fill the contiguous ``buffers`` with the message of ``hop``: as many as are sent, and of those sizes."""
        ...

    def send(self, hop: Hop, tensors: Sequence[Tensor]) -> Sent:
        """Send the contiguous ``tensors``, which must stay untouched until the wait."""
        ...


def count_bytes(counter: Counter[str], hop: Hop, tensors: Sequence[Tensor], inner: int) -> None:
    """Add one sent message to a transport's counter."""
    counter[link_of(hop, inner)] += sum(tensor.nbytes for tensor in tensors)


class Together(NamedTuple):
    """Several as one. Those of a process group are through when both ends have posted them, whatever they do."""

    parts: Sequence[Pending]

    def wait(self) -> None:
        """Wait for all of them."""
        for part in self.parts:
            part.wait()

    def is_over(self, due: bool) -> bool:
        """Without waiting nobody knows."""
        if due:
            self.wait()
        return due


class GroupTransport:
    """Messages through memory to ranks of this machine, and over process groups to others.

    Of groups there is one per channel, so that no chain queues behind another. Receives are posted before sends by the
    caller: gloo sends a receiver's readiness behind queued payload, so that two ranks which both send first talk in one
    direction at a time (measured: 651 ms against 350 for one exchange).

    Args:
        members: Global ranks, by position on the context axes.
        inner: Ranks of an inner ring.
        groups: Those that are needed.
        host: Carries messages to ranks of the same machine.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        inner: int,
        groups: dict[Channel, dist.ProcessGroup],
        host: HostMessages,
    ) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self._members = members
        self._inner = inner
        self._groups = groups
        self._host = host

    @property
    def num_ranks(self) -> int:
        """Context ranks."""
        return len(self._members)

    def small_bytes(self, peer: int) -> int:
        """See ``Transport.small_bytes``."""
        return 0 if self._members[peer] in self._host else _SMALL_BYTES  # in memory they are one message anyway

    def receive(self, hop: Hop, buffers: Sequence[Tensor]) -> Pending:
        """See ``Transport.receive``."""
        source = self._members[hop.source]
        if source in self._host:
            return self._host.receive(source, CHANNELS.index(hop.channel), buffers)
        group, place = self._groups[hop.channel], place_of(CHANNELS.index(hop.channel))
        return Together([_Posted.receive(buffer, source, group, place) for buffer in buffers])

    def send(self, hop: Hop, tensors: Sequence[Tensor]) -> Sent:
        """See ``Transport.send``."""
        count_bytes(self.sent_bytes, hop, tensors, self._inner)
        target = self._members[hop.target]
        if target in self._host:
            return self._host.send(target, CHANNELS.index(hop.channel), tensors)
        group, place = self._groups[hop.channel], place_of(CHANNELS.index(hop.channel))
        return Together([_Posted.send(tensor, target, group, place) for tensor in tensors])

    def close(self) -> None:
        """Free the process groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)


class _Posted(NamedTuple):
    """A message of a process group, and what to say if it does not come."""

    work: dist.Work | None
    place: str
    peer: int

    @classmethod
    def receive(cls, buffer: Tensor, source: int, group: dist.ProcessGroup, place: str) -> _Posted:
        return cls(_named(lambda: dist.irecv(buffer, src=source, group=group), place, source), place, source)

    @classmethod
    def send(cls, tensor: Tensor, target: int, group: dist.ProcessGroup, place: str) -> _Posted:
        return cls(_named(lambda: dist.isend(tensor, dst=target, group=group), place, target), place, target)

    def wait(self) -> None:
        if self.work is None:
            raise RuntimeError("this process is not a member of the ring's process groups.")
        _named(self.work.wait, self.place, self.peer)


def _named(call: Callable[[], T], place: str, peer: int) -> T:
    """What a call returns; an error of the connection says where it was, and with whom."""
    begun = time.monotonic()
    try:
        return call()
    except RuntimeError as error:
        if (cause := cause_of(error)) is None:
            raise
        raise PeerError(cause, place, peer, time.monotonic() - begun) from error


class HeadGroup:
    """The ranks that share attention heads (Ulysses), and the one collective they need.

    Args:
        members: Global ranks.
        rank: This one's.
        group: Of the members; None if all are on this machine.
        host: Carries messages to ranks of the same machine.
    """

    def __init__(
        self, members: tuple[int, ...], rank: int, group: dist.ProcessGroup | None, host: HostMessages
    ) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self.degree = len(members)
        self.rank = members.index(rank)
        self._members = members
        self._group = group
        self._host = host

    def exchange(self, sent: Tensor, received: Tensor) -> None:
        """All-to-all of [ranks, n], both contiguous: row i goes to head rank i, and what it sends here fills row i."""
        self.sent_bytes["head"] += sent[0].nbytes * (self.degree - 1)
        if self._group is not None:
            dist.all_to_all_single(received, sent, group=self._group)
            return
        others = [(i, other) for i, other in enumerate(self._members) if i != self.rank]
        arriving = [self._host.receive(other, _HEADS, [received[i]]) for i, other in others]
        leaving = [self._host.send(other, _HEADS, [sent[i]]) for i, other in others]
        received[self.rank].copy_(sent[self.rank])
        Together([*arriving, *leaving]).wait()

    def close(self) -> None:
        """Free the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
