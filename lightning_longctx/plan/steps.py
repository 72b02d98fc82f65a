"""The values a schedule is made of: slots of time, messages, and what one rank does in each slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_longctx.plan.parcels import ParcelIds

Channel = Literal["kv_inner", "kv_outer", "grad_inner", "grad_home"]
CHANNELS: tuple[Channel, ...] = ("kv_inner", "kv_outer", "grad_inner", "grad_home")
"""Each has a process group of its own, so that no chain queues behind another. Inner ones stay in a window."""


Share = Literal["all", "first", "last"]
"""Of the work in a slot: all of it, or one half."""


class Slot(NamedTuple):
    """One step of time: window distance, part of the blocks (None: all of them), inner distance, share of the work."""

    window: int
    part: int | None
    inner: int
    share: Share = "all"


class Hop(NamedTuple):
    """One message between context ranks: keys and values of ``parcels`` of ``home``, or their gradients."""

    channel: Channel
    source: int
    target: int
    home: int
    parcels: ParcelIds

    @property
    def is_gradient(self) -> bool:
        """Whether it carries gradients."""
        return self.channel.startswith("grad")


class Timed(NamedTuple):
    """A hop with the slots in which its receive is posted, its send is posted, and it is waited for."""

    receive_slot: int
    send_slot: int
    due_slot: int
    hop: Hop


@dataclass(frozen=True)
class Step:
    """What one rank does in one slot, in this order."""

    home: int
    """Whose keys are worked on; the rank itself in its own step, which needs no parcels."""
    parcels: ParcelIds
    """Which of them this rank has work with."""
    arrival: Hop | None
    """The message that brings the keys, waited for before anything else; None if there is none to wait for."""
    is_kept: bool
    """The message came in the forward pass already and was kept."""
    share: Share
    """How much of the work with them is done here."""
    receives: tuple[Hop, ...]
    """Posted before the sends."""
    sends: tuple[Hop, ...]
    """Keys and values passed on while the step computes."""
    accumulators: tuple[Hop, ...] = ()
    """Gradients to wait for after the computation and add its result to."""
    gradient_sends: tuple[Hop, ...] = ()
    """Sums passed on, or sent home, after that."""


@dataclass(frozen=True)
class Schedule:
    """One rank's steps for one pass.

    Args:
        steps: One per slot; every rank has the same number.
        returns: Gradients of this rank's own tokens that come home, waited for after the last step.
    """

    steps: tuple[Step, ...]
    returns: tuple[Hop, ...] = ()

    @property
    def sent(self) -> tuple[Hop, ...]:
        """All messages this rank sends."""
        return tuple(hop for step in self.steps for hop in (*step.sends, *step.gradient_sends))
