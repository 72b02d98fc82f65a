"""Moves key/value blocks and their gradients as a schedule says: posts, waits, and keeps what is on its way alive."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx.attention.merge import wide_dtype
from lightning_longctx.attention.transport import Pending, Transport
from lightning_longctx.plan.choose import AttentionPlan
from lightning_longctx.plan.counts import hop_tokens
from lightning_longctx.plan.needs import Pieces
from lightning_longctx.plan.schedules import Hop, Step

Block = tuple[Tensor, Tensor]
"""Keys and values (or their gradients) of some pieces of one home, joined along T: each [B, Hkv, T, D]."""


class Traffic:
    """The messages of one pass on one rank.

    Keys and values are two messages, each token-major [B, T, Hkv, D] on the wire: that is how projections and the CPU
    kernel lay them out in memory, so that as a rule nothing is copied before it is sent, not even for some pieces only.

    Args:
        plan: Says who holds what.
        transport: Carries messages; None if there is one rank.
        key: Own keys [B, Hkv, T, D].
        value: Own values, same shape.
    """

    def __init__(self, plan: AttentionPlan, transport: Transport | None, key: Tensor, value: Tensor) -> None:
        self._plan = plan
        self._transport = transport
        self._own = (key, value)
        self._arriving: dict[Hop, list[tuple[Pending, Tensor]]] = {}
        self._sending: list[list[tuple[Pending, Tensor]]] = [[]]

    def enter(self, step: Step) -> Block | None:
        """Wait for the step's block, post its receives, then its sends; return the keys and values to work on.

        Returns:
            The block of ``step.pieces``; None if there is no work.
        """
        block, held = (self.arrived(step.arrival), step.arrival.pieces) if step.arrival else (self._own, ())
        for hop in step.receives:
            self._post_receive(hop)
        self._sending.append([])
        for hop in step.sends:
            if hop.home == self._plan.rank:
                self.send(hop, self._own, self.all_pieces(hop.home))
            else:
                self.send(hop, block, held)
        if step.home == self._plan.rank:
            return self._own
        return self._select(block, step.home, held, step.pieces) if step.pieces else None

    def send(self, hop: Hop, block: Block, held: Pieces) -> None:
        """Send ``hop.pieces`` out of a block that holds ``held``."""
        for part in self._select(block, hop.home, held, hop.pieces):
            message = part.transpose(1, 2).contiguous()
            self._sending[-1].append((self._required.send(hop, message), message))

    def arrived(self, hop: Hop) -> Block:
        """Wait for messages whose receives were posted in an earlier step."""
        keys, values = self._arriving.pop(hop)
        keys[0].wait()
        values[0].wait()
        return keys[1].transpose(1, 2), values[1].transpose(1, 2)

    def add_arrived(self, hop: Hop, sums: Block, held: Pieces) -> None:
        """Wait for gradients and add them, piece by piece, to the sums over the keys and values of ``held``."""
        for total, part in zip(sums, self.arrived(hop), strict=True):
            into = self._views(total, hop.home, held)
            for piece, gradient in self._views(part, hop.home, hop.pieces).items():
                into[piece].add_(gradient)

    def settle(self, *, keep: int = 1) -> None:
        """Wait for all sends but those of the last ``keep`` steps, so that their buffers can go."""
        while len(self._sending) > keep:
            for pending, _ in self._sending.pop(0):
                pending.wait()

    def all_pieces(self, home: int) -> Pieces:
        """Every piece of a home rank."""
        return tuple(range(len(self._plan.shards[home])))

    def _select(self, block: Block, home: int, held: Pieces, wanted: Pieces) -> Block:
        """Cut pieces out of a block: views where they are neighbours, else copies."""
        if wanted == held:
            return block
        first = held.index(wanted[0])
        if held[first : first + len(wanted)] == wanted:
            shard = self._plan.shards[home]
            start = sum(len(shard[piece]) for piece in held[:first])
            stop = start + sum(len(shard[piece]) for piece in wanted)
            return block[0][:, :, start:stop], block[1][:, :, start:stop]
        views = [self._views(tensor, home, held) for tensor in block]
        keys, values = (torch.cat([parts[piece] for piece in wanted], dim=2) for parts in views)
        return keys, values

    def _views(self, tensor: Tensor, home: int, held: Pieces) -> dict[int, Tensor]:
        sizes = [len(self._plan.shards[home][piece]) for piece in held]
        return dict(zip(held, tensor.split(sizes, dim=2), strict=True))

    def _post_receive(self, hop: Hop) -> None:
        key = self._own[0]
        dtype = wide_dtype(key.dtype) if hop.channel.startswith("grad") else key.dtype
        shape = (key.shape[0], hop_tokens(hop, self._plan.shards), key.shape[1], key.shape[3])
        buffers = [torch.empty(shape, dtype=dtype, device=key.device) for _ in self._own]
        self._arriving[hop] = [(self._required.receive(hop, buffer), buffer) for buffer in buffers]

    @property
    def _required(self) -> Transport:
        if self._transport is None:
            raise ValueError("the plan has messages, but this call has no ring: SequenceRecord.ring is empty.")
        return self._transport
