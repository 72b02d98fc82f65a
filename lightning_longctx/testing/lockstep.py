"""Messages between ranks that live in one process, and all ranks advanced together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from lightning_longctx.attention.transport import Pending, Sent, Together, count_bytes
from lightning_longctx.plan.steps import Hop

T = TypeVar("T")

Link = tuple[str, int, int]
"""Channel, source and target."""


class Mailbox:
    """Messages between ranks. On each link the n-th receive that is posted gets the n-th message sent, as on a wire."""

    def __init__(self) -> None:
        self._sent: defaultdict[Link, list[tuple[Hop, Tensor] | None]] = defaultdict(list)
        self._posted: Counter[Link] = Counter()

    def put(self, hop: Hop, tensor: Tensor) -> None:
        """Queue a copy, as the wire would."""
        self._sent[_link(hop)].append((hop, tensor.clone()))

    def post(self, hop: Hop) -> int:
        """Announce a receive; returns which message of its link it will get."""
        self._posted[_link(hop)] += 1
        return self._posted[_link(hop)] - 1

    def take(self, hop: Hop, number: int, buffer: Tensor) -> None:
        """Deliver a message into ``buffer``.

        Raises:
            AssertionError: It was not sent yet (real ranks would hang), or is another one.
        """
        messages = self._sent[_link(hop)]
        assert number < len(messages), f"{hop} is waited for, but was not sent in an earlier slot: ranks would hang"
        message = messages[number]
        assert message is not None, f"{hop} is waited for twice"
        sent, tensor = message
        assert sent == hop, f"{hop} is waited for, but {sent} comes in its place on that link"
        assert tensor.shape == buffer.shape and tensor.dtype == buffer.dtype, (
            f"{hop}: {tensor.shape} into {buffer.shape}"
        )
        buffer.copy_(tensor)
        messages[number] = None

    def __len__(self) -> int:
        """Messages never received."""
        return sum(message is not None for messages in self._sent.values() for message in messages)


def _link(hop: Hop) -> Link:
    return hop.channel, hop.source, hop.target


class LoopbackTransport:
    """A ``Transport`` whose peers live in the same process."""

    def __init__(self, mailbox: Mailbox, inner: int) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self._mailbox = mailbox
        self._inner = inner

    def small_bytes(self, peer: int) -> int:
        """See ``Transport.small_bytes``."""
        return 1 << 16

    def receive(self, hop: Hop, buffers: Sequence[Tensor]) -> Pending:
        """See ``Transport.receive``."""
        return Together([_Receive(self._mailbox, hop, self._mailbox.post(hop), buffer) for buffer in buffers])

    def send(self, hop: Hop, tensors: Sequence[Tensor]) -> Sent:
        """See ``Transport.send``."""
        count_bytes(self.sent_bytes, hop, tensors, self._inner)
        for tensor in tensors:
            self._mailbox.put(hop, tensor)
        return Together(())


class _Receive(NamedTuple):
    mailbox: Mailbox
    hop: Hop
    number: int
    buffer: Tensor

    def wait(self) -> None:
        self.mailbox.take(self.hop, self.number, self.buffer)


def lockstep(passes: Sequence[Generator[None, None, T]]) -> list[T]:
    """Advance every rank's pass by one slot at a time until all end; all have the same number of slots."""
    results: dict[int, T] = {}
    while len(results) < len(passes):
        for rank, steps in enumerate(passes):
            try:
                next(steps)
            except StopIteration as end:
                results[rank] = end.value
    return [results[rank] for rank in range(len(passes))]
