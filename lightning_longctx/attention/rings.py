"""Open rings: what joins the ranks of one sequence, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, count

import torch.distributed as dist

from lightning_longctx.attention.buffers import Buffers, keep_freed_memory
from lightning_longctx.attention.host_messages import HostMessages
from lightning_longctx.attention.host_peers import Pairs, find_host_peers
from lightning_longctx.attention.transport import GroupTransport, HeadGroup
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.steps import CHANNELS, Channel
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.neighbours import CONTEXT, axis_groups, group_of


@dataclass(frozen=True, eq=False)
class Ring:
    """What joins the ranks of one sequence.

    Args:
        transport: Messages between context ranks; None if there is one.
        heads: The head ranks; None if there is one.
        communication: How messages travel.
        buffers: For what arrives; reused from layer to layer.
        host: Carries messages to ranks of the same machine.
    """

    transport: GroupTransport | None
    heads: HeadGroup | None
    communication: Communication
    buffers: Buffers
    host: HostMessages

    @property
    def sent_bytes(self) -> Counter[str]:
        """Bytes sent so far, by link: ``inner``, ``outer`` and, for exchanges of heads, ``head``."""
        ends = (self.transport, self.heads)
        return sum((end.sent_bytes for end in ends if end is not None), Counter())


_RINGS: dict[str, Ring] = {}
"""Open rings by name. A custom op takes no Python objects, so a ring enters it by name, as c10d groups do."""
_NUMBERS = count()  # never the same twice, also after rings were closed


def open_ring(
    degrees: Degrees,
    rank: int,
    timeout: timedelta,
    communication: Communication = Communication(),  # noqa: B008  frozen
) -> str:
    """Connect the ranks of every context group and head group; a collective over the whole world.

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
    name = f"ring{next(_NUMBERS)}"
    links, near = {}, Pairs()
    if communication.shared_memory:
        partners = {*group_of(degrees, rank, *CONTEXT), *group_of(degrees, rank, "head")} - {rank}
        links, near = find_host_peers(rank, partners, timeout)
    host, transport, heads = HostMessages(links, timeout), None, None
    for members in axis_groups(degrees, *CONTEXT) if degrees.context > 1 else ():
        groups: dict[Channel, dist.ProcessGroup] = {}
        for channel in CHANNELS:
            if any(pair not in near for pair in _pairs(channel, members, degrees.inner)):
                groups[channel] = _new_group(members, timeout, channel)
        if rank in members:
            transport = GroupTransport(members, degrees.inner, groups, host)
    for members in axis_groups(degrees, "head") if degrees.head > 1 else ():
        is_far = any(pair not in near for pair in map(frozenset, combinations(members, 2)))
        group = _new_group(members, timeout, "heads") if is_far else None
        if rank in members:
            heads = HeadGroup(members, rank, group, host)
    # A rank whose own ends are connected could close the ring while another one still connects to it.
    dist.barrier()
    _RINGS[name] = Ring(transport, heads, communication, Buffers(), host)
    return name


def _pairs(channel: Channel, members: tuple[int, ...], inner: int) -> Iterator[frozenset[int]]:
    """Which of a context group's ranks a channel joins.

    It gets a process group only if memory does not reach all of them: each group of gloo has a thread that wakes up a
    hundred times a second.
    """
    for (i, one), (j, other) in combinations(enumerate(members), 2):
        same_window = i // inner == j // inner
        if channel == "grad_home" or same_window == channel.endswith("inner"):
            yield frozenset((one, other))


def close_ring(name: str) -> None:
    """Free a ring's connections; a collective over the ring. The empty name is nothing to close."""
    if name:
        ring = _RINGS.pop(name)
        for end in (ring.transport, ring.heads):
            if end is not None:
                end.close()
        ring.host.close()


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
            "must run in a process set up by LongContextStrategy (or attention.open_ring)."
        )
    return _RINGS[name]


def _new_group(members: tuple[int, ...], timeout: timedelta, channel: str) -> dist.ProcessGroup:
    return dist.new_group(list(members), timeout=timeout, group_desc=f"{channel} of {members}")  # type: ignore[return-value]
