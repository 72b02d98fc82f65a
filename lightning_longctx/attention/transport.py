"""Point-to-point messages between context ranks: the only file of this room that calls ``torch.distributed``."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_longctx.plan.schedules import CHANNELS, Channel, Hop
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
    link = "inner" if hop.source // inner == hop.target // inner else "outer"
    counter[link] += tensor.nbytes


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


_RINGS: dict[str, GroupTransport] = {}
"""Open transports by name. A custom op takes no Python objects, so a ring enters it by name, as c10d groups do."""


def open_ring(degrees: Degrees, rank: int, timeout: timedelta) -> str:
    """Make the process groups of every context group; a collective over the whole world.

    Args:
        degrees: Resolved degrees of the run.
        rank: This process's global rank.
        timeout: For every message.

    Returns:
        The ring's name for ``SequenceRecord.ring``; empty if there is nobody to talk to.
    """
    if degrees.context == 1:
        return ""
    name = f"ring{len(_RINGS)}"
    for members in axis_groups(degrees, *CONTEXT):
        groups: dict[Channel, dist.ProcessGroup] = {}
        for channel in CHANNELS:
            group = dist.new_group(list(members), timeout=timeout, group_desc=f"{channel} of {members}")
            if rank in members:
                groups[channel] = group  # type: ignore[assignment]
        if rank in members:
            _RINGS[name] = GroupTransport(members, degrees.inner, groups)
    return name


def close_ring(name: str) -> None:
    """Free a ring's process groups; a collective over the ring. The empty name is nothing to close."""
    if name:
        _RINGS.pop(name).close()


def find_ring(name: str) -> Transport | None:
    """The open transport of that name; None for the empty one.

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
