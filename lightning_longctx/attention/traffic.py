"""Moves key/value blocks and their gradients as a schedule says: posts, waits, and keeps what is on its way alive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_longctx.attention.buffers import Buffers
from lightning_longctx.attention.merge import wide_dtype
from lightning_longctx.attention.messages import message_shape, num_bytes
from lightning_longctx.attention.transport import Pending, Sent, Transport
from lightning_longctx.plan.attention import AttentionPlan
from lightning_longctx.plan.counts import link_of
from lightning_longctx.plan.parcels import Interval, ParcelIds
from lightning_longctx.plan.steps import Hop, Step

Block = tuple[Tensor, Tensor]
"""Keys and values (or their gradients) of some parcels of one home, joined along T: each [B, Hkv, T, D]."""


class Traffic:
    """The messages of one pass on one rank.

    Keys and values of a message are two tensors, each token-major [B, T, Hkv, D]: that is how projections and the CPU
    kernel lay them out in memory, so that as a rule nothing is copied before it is sent, not even for some tokens only.
    Small ones are joined where to post a second tensor costs as much as to copy both (``Transport.small_bytes``).

    Args:
        plan: Says who holds what.
        transport: Carries messages; None if there is one rank.
        buffers: Memory for what arrives.
        key: Own keys [B, Hkv, T, D].
        value: Own values, same shape.
        wire: What is sent is rounded to this dtype; None sends keys as they are and gradients wide.
        kept: Memory of the hops that are kept for backward (see ``kept_memory``): filled in forward, read in backward.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        transport: Transport | None,
        buffers: Buffers,
        key: Tensor,
        value: Tensor,
        wire: torch.dtype | None = None,
        kept: dict[Hop, Tensor] | None = None,
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._own = (key, value)
        self._buffers = buffers
        self._wire = wire
        self._kept = kept or {}
        self._arriving: dict[Hop, tuple[Pending, Tensor]] = {}
        self._sending: list[_InUse] = []

    def enter(self, step: Step) -> Block | None:
        """Wait for the step's block, post its receives, then its sends; return the keys and values to work on.

        Returns:
            The block of ``step.parcels``, or this rank's own; None if there is no work.
        """
        self._sending.append(_InUse(self._buffers))
        block, held = self._block(step)
        for hop in step.receives:
            self._post_receive(hop)
        for hop in step.sends:
            if hop.home == self._plan.rank:
                self.send(hop, self._own, None)
            else:
                self.send(hop, block, held)
        if step.home == self._plan.rank:
            return self._own
        return self._select(block, step.home, held, step.parcels) if step.parcels else None

    def send(self, hop: Hop, block: Block, held: ParcelIds | None) -> None:
        """Send ``hop.parcels`` out of a block that holds ``held`` (None: this rank's whole shard)."""
        shape, dtype = message_shape(hop, self._plan, self._own[0]), self._dtype(hop)
        parts = [part.transpose(1, 2) for part in self._select(block, hop.home, held, hop.parcels)]
        if self._are_joined(hop.target, shape, dtype):
            joined = self._buffers.take((2, *shape), dtype, self._own[0].device)
            self._sending[-1].lent.append(joined)
            for into, part in zip(joined, parts, strict=True):
                into.copy_(part)
            message = [joined]
        else:
            message = [part.to(dtype).contiguous() for part in parts]
        link = link_of(hop, self._plan.ring.inner)
        self._sending[-1].sends.append((link, self._required.send(hop, message), message))

    def add_arrived(self, hop: Hop, sums: Block, held: ParcelIds | None) -> None:
        """Wait for gradients and add them, parcel by parcel, to the sums over the keys and values of ``held``."""
        spans = self._spans(hop.home, held)
        arrived = self._wait_for(hop)
        for total, message in zip(sums, arrived, strict=True):
            part, start = message.transpose(1, 2), 0
            for first, last in (span for parcel in hop.parcels for span in spans[parcel]):
                total[:, :, first:last].add_(part[:, :, start : start + last - first])
                start += last - first
        self._buffers.give(arrived)

    def settle(self) -> None:
        """End sends of earlier steps, so that their buffers can be used again.

        Those inside an inner ring are due a step later. Those between inner rings travel behind the work of a whole
        window; to wait sooner would stop that work.
        """
        rotation = self._plan.ring.window_slots
        for in_use in self._sending:
            in_use.age += 1
            in_use.settle(outer=in_use.age > rotation, inner=in_use.age > 1)
        self._sending = [in_use for in_use in self._sending if in_use.age == 1 or in_use.sends]

    def finish(self) -> None:
        """Wait for all sends."""
        for in_use in self._sending:
            in_use.finish()

    def _block(self, step: Step) -> tuple[Block, ParcelIds | None]:
        if step.arrival is None:
            return self._own, None
        if step.is_kept:
            block = self._kept[step.arrival]
        else:
            block = self._wait_for(step.arrival)
            if step.arrival not in self._kept:
                self._sending[-1].lent.append(block)
        keys, values = block.unbind(0)
        dtype = self._own[0].dtype
        return (keys.transpose(1, 2).to(dtype), values.transpose(1, 2).to(dtype)), step.arrival.parcels

    def _wait_for(self, hop: Hop) -> Tensor:
        """What a receive that was posted in an earlier step brings, [2, B, T, Hkv, D]."""
        pending, arrived = self._arriving.pop(hop)
        pending.wait()
        return arrived

    def _post_receive(self, hop: Hop) -> None:
        shape, dtype = message_shape(hop, self._plan, self._own[0]), self._dtype(hop)
        buffer = self._kept.get(hop)
        if buffer is None:
            buffer = self._buffers.take((2, *shape), dtype, self._own[0].device)
        message = [buffer] if self._are_joined(hop.source, shape, dtype) else buffer.unbind(0)
        self._arriving[hop] = self._required.receive(hop, message), buffer

    def _are_joined(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether keys and values of that shape are sent as one tensor; both ends ask."""
        return num_bytes(shape, dtype) <= self._required.small_bytes(peer)

    def _dtype(self, hop: Hop) -> torch.dtype:
        own = self._own[0].dtype
        return self._wire or (wide_dtype(own) if hop.is_gradient else own)

    def _select(self, block: Block, home: int, held: ParcelIds | None, wanted: ParcelIds) -> Block:
        """Cut parcels out of a block: views where they are neighbours, else copies."""
        if wanted == held:
            return block
        spans = self._spans(home, held)
        runs = _joined([span for parcel in wanted for span in spans[parcel]])
        if len(runs) == 1:
            start, stop = runs[0]
            return block[0][:, :, start:stop], block[1][:, :, start:stop]
        keys, values = (_gathered(tensor, runs) for tensor in block)
        return keys, values

    def _spans(self, home: int, held: ParcelIds | None) -> dict[int, tuple[Interval, ...]]:
        """Where in a block each parcel lies: at its place in the shard, or one after another."""
        parcels = self._plan.ring.parcels[home]
        if held is None:
            return {index: parcel.intervals for index, parcel in enumerate(parcels)}
        spans: dict[int, tuple[Interval, ...]] = {}
        start = 0
        for index in held:
            runs = []
            for first, last in parcels[index].intervals:
                runs.append((start, start + last - first))
                start += last - first
            spans[index] = tuple(runs)
        return spans

    @property
    def _required(self) -> Transport:
        if self._transport is None:
            raise ValueError("the plan has messages, but this call has no ring: SequenceRecord.ring is empty.")
        return self._transport


class _InUse:
    """What a step has on its way: sends with their messages, and buffers that are lent until those are gone.

    ``age`` counts the steps that have ended since, its own included.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.sends: list[tuple[str, Sent, Sequence[Tensor]]] = []
        self.lent: list[Tensor] = []
        self.age = 0
        self._buffers = buffers

    def settle(self, *, outer: bool, inner: bool) -> None:
        """Forget sends that are over, those on due links at the latest; when none is left, give back what is lent."""
        due = {"outer": outer, "inner": inner}
        self.sends = [send for send in self.sends if not send[1].is_over(due[send[0]])]
        if inner and not self.sends:
            self._give_back()

    def finish(self) -> None:
        """Wait for all sends."""
        for _, sent, _ in self.sends:
            sent.wait()
        self.sends.clear()
        self._give_back()

    def _give_back(self) -> None:
        while self.lent:
            self._buffers.give(self.lent.pop())


def _joined(spans: list[Interval]) -> list[Interval]:
    runs: list[Interval] = []
    for start, stop in spans:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs


def _gathered(tensor: Tensor, runs: list[Interval]) -> Tensor:
    token_major = tensor.transpose(1, 2)
    return torch.cat([token_major[:, start:stop] for start, stop in runs], dim=1).transpose(1, 2)
