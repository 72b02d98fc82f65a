"""All ranks of a mesh stepped together inside one process: big grids of parity tests in seconds, float64 included."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from lightning_longctx.attention import ring
from lightning_longctx.attention.backends import choose_backend
from lightning_longctx.attention.transport import Pending, count_bytes
from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.schedules import Hop
from lightning_longctx.sequence.layout import LayoutName
from lightning_longctx.testing.oracle import gather_shards, take_shard

T = TypeVar("T")


class Mailbox:
    """Messages between ranks, in the order of sending on each (channel, source, target), as on a real link."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int, int], deque[tuple[Hop, Tensor]]] = defaultdict(deque)

    def put(self, hop: Hop, tensor: Tensor) -> None:
        """Queue a copy, as the wire would."""
        self._queues[hop.channel, hop.source, hop.target].append((hop, tensor.clone()))

    def take(self, hop: Hop, buffer: Tensor) -> None:
        """Deliver the next message of that link into ``buffer``.

        Raises:
            AssertionError: Nothing was sent yet (real ranks would hang), or another message comes first.
        """
        queue = self._queues[hop.channel, hop.source, hop.target]
        assert queue, f"{hop} is waited for, but was not sent in an earlier slot: real ranks would hang"
        sent, tensor = queue.popleft()
        assert sent == hop, f"{hop} is waited for, but {sent} comes first on that link"
        assert tensor.shape == buffer.shape and tensor.dtype == buffer.dtype, (
            f"{hop}: {tensor.shape} into {buffer.shape}"
        )
        buffer.copy_(tensor)

    def __len__(self) -> int:
        """Messages never received."""
        return sum(map(len, self._queues.values()))


class LoopbackTransport:
    """A ``Transport`` whose peers live in the same process."""

    def __init__(self, mailbox: Mailbox, inner: int) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self._mailbox = mailbox
        self._inner = inner

    def receive(self, hop: Hop, buffer: Tensor) -> Pending:
        """See ``Transport.receive``."""
        return _Receive(self._mailbox, hop, buffer)

    def send(self, hop: Hop, tensor: Tensor) -> Pending:
        """See ``Transport.send``."""
        count_bytes(self.sent_bytes, hop, tensor, self._inner)
        self._mailbox.put(hop, tensor)
        return _Sent()


class _Receive(NamedTuple):
    mailbox: Mailbox
    hop: Hop
    buffer: Tensor

    def wait(self) -> None:
        self.mailbox.take(self.hop, self.buffer)


class _Sent:
    def wait(self) -> None:
        """The mailbox took a copy."""


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


class LoopbackResult(NamedTuple):
    """Full, un-sharded tensors in global order, and bytes sent by link on every rank."""

    out: Tensor
    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    sent_bytes: tuple[Counter[str], ...]


def attention_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    *,
    layout: LayoutName,
    num_ranks: int,
    inner: int,
    mask: Mask = CAUSAL,
    backend: str = "auto",
    scale: float | None = None,
) -> LoopbackResult:
    """Shard full tensors, run forward and backward on all ranks in lockstep, and join the results.

    Args:
        query: [B, Hq, N, D]; key, value: [B, Hkv, N, D]; grad: gradient of the output, shaped like query.
        key: See query.
        value: See query.
        grad: See query.
        layout: How to shard.
        num_ranks: Context ranks.
        inner: Ranks in an inner ring.
        mask: Who sees whom.
        backend: Name of the backend.
        scale: Factor on the scores; None is ``D ** -0.5``.
    """
    plans = [plan_attention(query.shape[2], layout, num_ranks, inner, rank, mask) for rank in range(num_ranks)]
    shards = plans[0].shards
    mailbox = Mailbox()
    transports = [LoopbackTransport(mailbox, inner) for _ in plans]
    engine = choose_backend(backend, query.device, query.dtype, query.shape[-1])
    factor = query.shape[-1] ** -0.5 if scale is None else scale

    local = [[take_shard(tensor, ranges, 2) for tensor in (query, key, value, grad)] for ranges in shards]
    results = lockstep(
        [
            ring.forward(p, t, engine, q, k, v, factor)
            for p, t, (q, k, v, _) in zip(plans, transports, local, strict=True)
        ]
    )
    saved = [(q, k, v, out, lse) for (q, k, v, _), (out, lse) in zip(local, results, strict=True)]
    grads = lockstep(
        [
            ring.backward(p, t, engine, tensors, shard[3], factor)
            for p, t, tensors, shard in zip(plans, transports, saved, local, strict=True)
        ]
    )
    assert len(mailbox) == 0, f"{len(mailbox)} messages were sent and never received"
    out = gather_shards([result[0] for result in results], shards, 2)
    dquery, dkey, dvalue = (gather_shards([rank[index] for rank in grads], shards, 2) for index in range(3))
    return LoopbackResult(out, dquery, dkey, dvalue, tuple(transport.sent_bytes for transport in transports))
