"""Messages between processes of one machine: the receiver reads them out of the sender's memory, in one copy.

Over TCP gloo's threads and the kernel copy them several times; with as many ranks as cores that time is taken from
attention. Here a Unix socket for each pair of ranks carries only notices: *offered*, with the place of a message, and
*taken*. There is no thread: whoever waits for one message takes all that were asked for and are there.

A rank that waits for gloo takes nothing meanwhile. So nobody may wait for a message to be taken while others still need
something from it: senders look whether it was (``is_over``), and wait when they have sent everything.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch import Tensor

from lightning_longctx.attention import peer_memory
from lightning_longctx.attention.peer_errors import PeerError, place_of

MOST_TENSORS = 2
"""In one message: keys and values."""

_NOTICE = struct.Struct(f"<BBIQ{MOST_TENSORS}Q")  # kind, channel, number, bytes, addresses
_OFFERED, _TAKEN = 0, 1
_POLL_SECONDS, _FULL_SECONDS = 3600.0, 0.001  # selectors take 24 days at most; a full socket is tried again soon


class Link(NamedTuple):
    """How to reach one rank: a connected SOCK_SEQPACKET socket, and the rank's process id."""

    socket: socket.socket
    process: int


class _Key(NamedTuple):
    """The number-th message of a channel from (or to) a rank."""

    peer: int
    channel: int
    number: int


class Message(NamedTuple):
    """One on its way, to this rank or from it; ``pending`` are those like it that were not taken yet."""

    carrier: HostMessages
    pending: Mapping[_Key, Sequence[Tensor]]
    key: _Key

    def wait(self) -> None:
        """Block until it was taken: the buffers may be read (receive), the tensors reused (send)."""
        self.carrier.wait_for(self.key, self.pending)

    def is_over(self, due: bool) -> bool:
        """Whether it was taken. Never blocks, due or not: the receiver may wait for gloo, and then takes nothing."""
        if self.key in self.pending:
            self.carrier.listen(0.0)
        return self.key not in self.pending


class HostMessages:
    """Carries messages to and from ranks whose memory this process can read.

    On each channel the n-th receive gets the n-th message that was sent. Both calls return at once.

    Args:
        links: By global rank; none where no rank can be reached so.
        timeout: For every message.
    """

    def __init__(self, links: dict[int, Link], timeout: timedelta) -> None:
        self._links = links
        self._seconds = timeout.total_seconds()
        self._ended: set[int] = set()
        self._counts: Counter[tuple[str, int, int]] = Counter()
        self._wanted: dict[_Key, Sequence[Tensor]] = {}
        self._offered: dict[_Key, tuple[int, list[int]]] = {}
        self._untaken: dict[_Key, Sequence[Tensor]] = {}  # keeps them alive, too
        self._unsent: deque[tuple[int, bytes]] = deque()  # notices that a full socket did not take
        self._selector = selectors.DefaultSelector()
        for rank, link in links.items():
            link.socket.setblocking(False)
            self._selector.register(link.socket, selectors.EVENT_READ, rank)
        _OPEN.add(self)

    def __contains__(self, rank: int) -> bool:
        """Whether messages go this way; that rank says the same of this one."""
        return rank in self._links

    def receive(self, source: int, channel: int, buffers: Sequence[Tensor]) -> Message:
        """Fill one or two contiguous buffers with the next message of a channel."""
        key = self._next("receive", source, channel)
        self._wanted[key] = buffers
        self._copy(key)
        return Message(self, self._wanted, key)

    def send(self, target: int, channel: int, tensors: Sequence[Tensor]) -> Message:
        """Offer one or two contiguous tensors, which must stay untouched until the wait."""
        key = self._next("send", target, channel)
        self._untaken[key] = tensors
        self._notify(_OFFERED, key, sum(tensor.nbytes for tensor in tensors), [x.data_ptr() for x in tensors])
        return Message(self, self._untaken, key)

    def close(self) -> None:
        """Close the sockets when all notices have left; all messages must have been waited for."""
        deadline = time.monotonic() + self._seconds
        while self._unsent and time.monotonic() < deadline:
            self.listen(_FULL_SECONDS)
        _OPEN.discard(self)
        self.forget()

    def forget(self) -> None:
        """Close this process' ends."""
        self._selector.close()
        for link in self._links.values():
            link.socket.close()

    def _next(self, direction: str, peer: int, channel: int) -> _Key:
        number = self._counts[direction, peer, channel]
        self._counts[direction, peer, channel] += 1
        return _Key(peer, channel, number)

    def wait_for(self, key: _Key, pending: Mapping[_Key, Sequence[Tensor]]) -> None:
        """Wait until a message is no longer pending.

        Raises:
            PeerError: The other rank has ended, or the timeout is over.
        """
        deadline, left = time.monotonic() + self._seconds, 0.0
        while key in pending:
            self.listen(left)
            if key in pending and key.peer in self._ended:
                raise PeerError("lost", place_of(key.channel), key.peer, time.monotonic() - deadline + self._seconds)
            if key in pending and (left := deadline - time.monotonic()) <= 0:
                raise PeerError("late", place_of(key.channel), key.peer, self._seconds)

    def listen(self, seconds: float) -> None:
        """Read notices, waiting at most that long for the first, and take what is wanted."""
        seconds = min(seconds, _FULL_SECONDS if self._unsent else _POLL_SECONDS)
        for ready, _ in self._selector.select(seconds):
            self._read_notices(ready.data)
        self._flush()

    def _read_notices(self, peer: int) -> None:
        end = self._links[peer].socket
        while True:
            try:
                notice = end.recv(_NOTICE.size)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it did not read all of ours; what it sent is still there
                continue
            if not notice:  # no fault yet: it may have nothing more to say
                self._selector.unregister(end)
                self._ended.add(peer)
                return
            kind, channel, number, size, *addresses = _NOTICE.unpack(notice)
            key = _Key(peer, channel, number)
            if kind == _TAKEN:
                del self._untaken[key]
            else:
                self._offered[key] = (size, addresses)
                self._copy(key)

    def _copy(self, key: _Key) -> None:
        """Take a message if it is both wanted and there."""
        if key not in self._wanted or key not in self._offered:
            return
        buffers, (size, addresses) = self._wanted[key], self._offered.pop(key)
        if size != (expected := sum(buffer.nbytes for buffer in buffers)):
            raise RuntimeError(f"rank {key.peer} sent {size} bytes where {expected} were expected.")
        try:
            peer_memory.read(self._links[key.peer].process, addresses[: len(buffers)], buffers)
        except ProcessLookupError as error:  # it has ended since it offered this
            raise PeerError("lost", place_of(key.channel), key.peer, 0.0) from error
        del self._wanted[key]
        self._notify(_TAKEN, key)

    def _notify(self, kind: int, key: _Key, size: int = 0, addresses: Sequence[int] = ()) -> None:
        unused = [0] * (MOST_TENSORS - len(addresses))
        self._unsent.append((key.peer, _NOTICE.pack(kind, key.channel, key.number, size, *addresses, *unused)))
        self._flush()
        if kind == _OFFERED and key.peer in self._ended:
            raise PeerError("lost", place_of(key.channel), key.peer, 0.0)

    def _flush(self) -> None:
        """Send notices, in order, until a socket is full: its rank has hundreds to read."""
        while self._unsent:
            peer, notice = self._unsent[0]
            try:
                self._links[peer].socket.send(notice)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._ended.add(peer)
            self._unsent.popleft()


_OPEN: weakref.WeakSet[HostMessages] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child (a loader's worker) that held the sockets would hide its parent's end from the other ranks."""
    for messages in list(_OPEN):
        messages.forget()


if hasattr(os, "register_at_fork"):  # where processes can fork
    os.register_at_fork(after_in_child=_forget_in_child)
