"""Point-to-point messages between context ranks: the only file of this room that calls ``torch.distributed``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_longctx.attention.buffers import Buffers, keep_freed_memory
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.counts import link_of
from lightning_longctx.plan.steps import CHANNELS, Channel, Hop
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.neighbours import CONTEXT, axis_groups


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Block until the buffer may be read (receive) or reused (send)."""
        ...


class Transport(Protocol):
    """Carries the hops of a schedule. Both calls return at once; callers post a step's receives before its sends."""

    sent_bytes: Counter[str]
    """Bytes sent so far by link (``inner`` or ``outer``); must equal ``plan.counts.sent_bytes``."""

    def receive(self, hop: Hop, buffer: Tensor) -> Pending:
        """Fill the contiguous ``buffer`` with the message of ``hop``."""
        ...

    def send(self, hop: Hop, tensor: Tensor) -> Pending:
        """Send the contiguous ``tensor``, which must stay untouched until the wait."""
        ...


def count_bytes(counter: Counter[str], hop: Hop, tensor: Tensor, inner: int) -> None:
    """Add one sent message to a transport's counter."""
    counter[link_of(hop, inner)] += tensor.nbytes


class GroupTransport:
    """Messages over process groups, one per channel, so that no chain queues behind another.

    Receives are posted before sends by the caller: gloo sends a receiver's readiness behind queued payload, so that two
    ranks which both send first talk in one direction at a time (measured: 651 ms against 350 for one exchange).
    """

    def __init__(self, members: tuple[int, ...], inner: int, groups: dict[Channel, dist.ProcessGroup]) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self._members = members  # global ranks: a position on the context axes is no peer for torch.distributed
        self._inner = inner
        self._groups = groups

    def receive(self, hop: Hop, buffer: Tensor) -> Pending:
        """See ``Transport.receive``."""
        return _posted(dist.irecv(buffer, src=self._members[hop.source], group=self._groups[hop.channel]))

    def send(self, hop: Hop, tensor: Tensor) -> Pending:
        """See ``Transport.send``."""
        count_bytes(self.sent_bytes, hop, tensor, self._inner)
        return _posted(dist.isend(tensor, dst=self._members[hop.target], group=self._groups[hop.channel]))

    def close(self) -> None:
        """Free the process groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)


def _posted(work: dist.Work | None) -> Pending:
    if work is None:
        raise RuntimeError("this process is not a member of the ring's process groups.")
    return work


class HeadGroup:
    """The ranks that share attention heads (Ulysses), and the one collective they need."""

    def __init__(self, members: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self.degree = len(members)
        self.rank = members.index(rank)
        self._group = group

    def exchange(self, sent: Tensor, received: Tensor) -> None:
        """All-to-all of [ranks, n], both contiguous: row i goes to head rank i, and what it sends here fills row i."""
        self.sent_bytes["head"] += sent[0].nbytes * (self.degree - 1)
        dist.all_to_all_single(received, sent, group=self._group)

    def close(self) -> None:
        """Free the process group."""
        dist.destroy_process_group(self._group)


@dataclass(frozen=True, eq=False)
class Ring:
    """What joins the ranks of one sequence.

    Args:
        transport: Messages between context ranks; None if there is one.
        heads: The head ranks; None if there is one.
        communication: How messages travel.
        buffers: For what arrives; reused from layer to layer.
    """

    transport: GroupTransport | None
    heads: HeadGroup | None
    communication: Communication
    buffers: Buffers

    @property
    def sent_bytes(self) -> Counter[str]:
        """Bytes sent so far, by link: ``inner``, ``outer`` and, for exchanges of heads, ``head``."""
        ends = (self.transport, self.heads)
        return sum((end.sent_bytes for end in ends if end is not None), Counter())


_RINGS: dict[str, Ring] = {}
"""Open rings by name. A custom op takes no Python objects, so a ring enters it by name, as c10d groups do."""


def open_ring(
    degrees: Degrees,
    rank: int,
    timeout: timedelta,
    communication: Communication = Communication(),  # noqa: B008  frozen
) -> str:
    """Make the process groups of every context group and head group; a collective over the whole world.

    Args:
        degrees: Resolved degrees of the run.
        rank: This process's global rank.
        timeout: For every message.
        communication: How messages travel.

    Returns:
        The ring's name for ``SequenceRecord.ring``; empty if there is nobody to talk to.
    """
    if degrees.context * degrees.head == 1:
        return ""
    keep_freed_memory()
    name = f"ring{len(_RINGS)}"
    transport, heads = None, None
    for members in axis_groups(degrees, *CONTEXT) if degrees.context > 1 else ():
        groups: dict[Channel, dist.ProcessGroup] = {c: _new_group(members, timeout, c) for c in CHANNELS}
        if rank in members:
            transport = GroupTransport(members, degrees.inner, groups)
    for members in axis_groups(degrees, "head") if degrees.head > 1 else ():
        group = _new_group(members, timeout, "heads")
        if rank in members:
            heads = HeadGroup(members, rank, group)
    _RINGS[name] = Ring(transport, heads, communication, Buffers())
    return name


def close_ring(name: str) -> None:
    """Free a ring's process groups; a collective over the ring. The empty name is nothing to close."""
    if name:
        ring = _RINGS.pop(name)
        for end in (ring.transport, ring.heads):
            if end is not None:
                end.close()


def find_ring(name: str) -> Ring | None:
    """The open ring of that name; None for the empty one.

    Raises:
        ValueError: No such ring is open in this process.
    """
    if not name:
        return None
    if name not in _RINGS:
        raise ValueError(
            f"the batch was cut for the ring {name!r}, which is not open in this process: attention over shards "
            "must run in a process set up by LongContextStrategy (or attention.transport.open_ring)."
        )
    return _RINGS[name]


def _new_group(members: tuple[int, ...], timeout: timedelta, channel: str) -> dist.ProcessGroup:
    return dist.new_group(list(members), timeout=timeout, group_desc=f"{channel} of {members}")  # type: ignore[return-value]
