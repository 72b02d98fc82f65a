"""DoubleRing attention as values: who sends which pieces to whom, in which step (after LoongTrain, arXiv 2406.18485).

Context ranks form ``windows`` inner rings of ``inner`` ranks, window-major. Time is a list of *slots*, the same on
every rank. In slot (j, piece, s) rank (m, i) works on keys whose home is s places behind it on its inner ring and j
windows behind it on the outer one. A flat ring is one window. In the own window all pieces of a block travel together;
in a foreign window each piece has an inner rotation of its own, so that work starts when the first one is in.

Need-aware: a piece goes exactly as far along its chain as the last stop that wants it, inside a window and between
windows; both ends of a hop compute that from the same table. An accumulator of dK/dV goes from contributor to next
contributor, and the last one sends it straight home; a rank's own share never travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from lightning_longctx.plan.needs import Needs, Pieces

Channel = Literal["kv_inner", "kv_outer", "grad_inner", "grad_outer", "grad_home"]
CHANNELS: tuple[Channel, ...] = ("kv_inner", "kv_outer", "grad_inner", "grad_outer", "grad_home")
"""Each has a process group of its own, so that no chain queues behind another."""


class Slot(NamedTuple):
    """One step of time: window distance, index of the piece (None: all), inner distance."""

    window: int
    piece: int | None
    inner: int


class Hop(NamedTuple):
    """One message between context ranks: keys and values of ``pieces`` of ``home``, or their gradients."""

    channel: Channel
    source: int
    target: int
    home: int
    pieces: Pieces


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
    """Whose keys are worked on."""
    pieces: Pieces
    """Which of them this rank has work with."""
    arrival: Hop | None
    """The message that brings the keys, waited for before anything else; None if there is none to wait for."""
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
        returns: Gradients of this rank's own pieces that come home, waited for after the last step.
    """

    steps: tuple[Step, ...]
    returns: tuple[Hop, ...] = ()

    @property
    def sent(self) -> tuple[Hop, ...]:
        """All messages this rank sends."""
        return tuple(hop for step in self.steps for hop in (*step.sends, *step.gradient_sends))


@dataclass(frozen=True)
class DoubleRing:
    """The message tables of one attention call over ``windows`` x ``inner`` ranks.

    Args:
        windows: Number of inner rings.
        inner: Ranks in each.
        needs: ``needs[rank][home]``, see ``plan.needs``.
        num_pieces: Largest number of pieces any rank holds.
        direction: -1 passes keys to earlier ranks, +1 to later ones.
    """

    windows: int
    inner: int
    needs: Needs
    num_pieces: int
    direction: Literal[-1, 1] = -1

    def schedule(self, rank: int, *, backward: bool) -> Schedule:
        """Cut one rank's view out of the tables.

        Forward takes the own window first. Backward starts with the own block, then foreign windows, then the rest of
        the own window: the first outer transfer hides behind the own block, and gradients go home behind the rest.
        """
        slots = self.backward_slots if backward else self.forward_slots
        keys = self._by_rank(self.backward_keys if backward else self.forward_keys, rank)
        grads = self._by_rank(self.gradients if backward else (), rank)
        steps = []
        for index, slot in enumerate(slots):
            home = self.home(slot, rank)
            steps.append(
                Step(
                    home=home,
                    pieces=self._wanted(slot, rank, home),
                    arrival=next((t.hop for t in keys.incoming if t.due_slot == index), None),
                    receives=tuple(t.hop for t in (*keys.incoming, *grads.incoming) if t.receive_slot == index),
                    sends=tuple(t.hop for t in keys.outgoing if t.send_slot == index),
                    accumulators=tuple(t.hop for t in grads.incoming if t.due_slot == index),
                    gradient_sends=tuple(t.hop for t in grads.outgoing if t.send_slot == index),
                )
            )
        return Schedule(tuple(steps), tuple(t.hop for t in grads.incoming if t.due_slot == len(slots)))

    @cached_property
    def forward_slots(self) -> tuple[Slot, ...]:
        """Own window, then the foreign ones."""
        return (*self._own_window, *self._foreign_windows)

    @cached_property
    def backward_slots(self) -> tuple[Slot, ...]:
        """Own block, foreign windows, rest of the own window."""
        return (*self._own_window[:1], *self._foreign_windows, *self._own_window[1:])

    @cached_property
    def forward_keys(self) -> tuple[Timed, ...]:
        """Every message of the forward pass."""
        return tuple(self._key_hops(self.forward_slots))

    @cached_property
    def backward_keys(self) -> tuple[Timed, ...]:
        """Every message of the backward pass that carries keys and values."""
        return tuple(self._key_hops(self.backward_slots))

    @cached_property
    def gradients(self) -> tuple[Timed, ...]:
        """Every message of the backward pass that carries gradients."""
        return tuple(self._gradient_hops(self.backward_slots))

    @property
    def _own_window(self) -> tuple[Slot, ...]:
        return tuple(Slot(0, None, s) for s in range(self.inner))

    @property
    def _foreign_windows(self) -> tuple[Slot, ...]:
        return tuple(
            Slot(j, piece, s)
            for j in range(1, self.windows)
            for piece in range(self.num_pieces)
            for s in range(self.inner)
        )

    def home(self, slot: Slot, rank: int) -> int:
        """Whose keys ``rank`` may hold in ``slot``."""
        return self._shift(rank, -slot.window, -slot.inner)

    def holder(self, slot: Slot, home: int) -> int:
        """Who may hold the keys of ``home`` in ``slot``."""
        return self._shift(home, slot.window, slot.inner)

    def _shift(self, rank: int, windows: int, inner: int) -> int:
        window, place = divmod(rank, self.inner)
        window = (window + self.direction * windows) % self.windows
        return window * self.inner + (place + self.direction * inner) % self.inner

    def _wanted(self, slot: Slot, rank: int, home: int) -> Pieces:
        return tuple(p for p in self.needs[rank][home] if slot.piece is None or p == slot.piece)

    def _carried(self, slot: Slot, home: int) -> Pieces:
        """Pieces of ``home`` that travel as far as ``slot``: some stop from here on wants them."""
        windows = range(slot.window, self.windows if slot.inner == 0 else slot.window + 1)
        stops = [
            self.holder(Slot(j, None, s), home)
            for j in windows
            for s in range(slot.inner if j == slot.window else 0, self.inner)
        ]
        return tuple(sorted({piece for stop in stops for piece in self._wanted(slot, stop, home)}))

    def _key_hops(self, slots: tuple[Slot, ...]) -> list[Timed]:
        hops = []
        when = {slot: index for index, slot in enumerate(slots)}
        for due, slot in enumerate(slots):
            if slot == self._own_window[0]:
                continue
            if slot.inner:
                channel, before, posted = "kv_inner", slot._replace(inner=slot.inner - 1), due - 1
            else:
                # An outer block is passed on the moment it is in, and travels behind a whole inner rotation.
                earlier = slot.window - 1
                channel, before = "kv_outer", Slot(earlier, slot.piece if earlier else None, 0)
                posted = when[before]
            for home in range(self.windows * self.inner):
                if pieces := self._carried(slot, home):
                    hop = Hop(channel, self.holder(before, home), self.holder(slot, home), home, pieces)
                    hops.append(Timed(posted, posted, due, hop))
        return hops

    def _gradient_hops(self, slots: tuple[Slot, ...]) -> list[Timed]:
        hops: list[Timed] = []
        for home in range(self.windows * self.inner):
            together: dict[tuple[int, int], list[int]] = {}
            for piece in sorted({p for needs in self.needs for p in needs[home]}):
                visits = self._contributions(slots, home, piece)
                for sent, due in pairwise([*visits, len(slots)]):
                    together.setdefault((sent, due), []).append(piece)
            hops += [
                self._gradient_hop(slots, sent, due, home, tuple(pieces)) for (sent, due), pieces in together.items()
            ]
        return sorted(hops)

    def _contributions(self, slots: tuple[Slot, ...], home: int, piece: int) -> list[int]:
        """Slots in which some rank but ``home`` has work with a piece, in time order."""
        stops = [(index, slot, self.holder(slot, home)) for index, slot in enumerate(slots)]
        return [index for index, slot, rank in stops if rank != home and piece in self._wanted(slot, rank, home)]

    def _gradient_hop(self, slots: tuple[Slot, ...], sent: int, due: int, home: int, pieces: Pieces) -> Timed:
        source = self.holder(slots[sent], home)
        if due == len(slots):
            return Timed(0, sent, due, Hop("grad_home", source, home, home, pieces))
        target = self.holder(slots[due], home)
        channel: Channel = "grad_inner" if source // self.inner == target // self.inner else "grad_outer"
        return Timed(sent, sent, due, Hop(channel, source, target, home, pieces))

    @staticmethod
    def _by_rank(hops: tuple[Timed, ...], rank: int) -> _View:
        return _View([t for t in hops if t.hop.target == rank], [t for t in hops if t.hop.source == rank])


class _View(NamedTuple):
    incoming: list[Timed]
    outgoing: list[Timed]
