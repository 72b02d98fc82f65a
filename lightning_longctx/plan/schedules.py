"""DoubleRing attention as values: who sends what to whom, in which slot (after LoongTrain, arXiv 2406.18485).

Context ranks form ``windows`` inner rings of ``inner`` ranks, window-major. Time is a list of *slots*, the same on
every rank. In slot (j, part, s) rank (m, i) works on keys whose home is s places behind it on its inner ring and j
windows behind it on the outer one. A flat ring is one window. In the own window all of a block travels together; in a
foreign window each part of it has an inner rotation of its own, so that work starts when the first one is in.

The *route* says from whom a rank gets what it works on:

* ``double_ring``: from its neighbour on the inner ring; what enters a window comes from the window before. A parcel
  goes exactly as far along its chain as the last stop that wants it.
* ``direct``: what enters a window comes straight from home, and goes straight from the rank where it enters to those
  that want it.
* ``all_gather``: everything comes straight from home, all at once.

Both ends of a hop read it from the same table, and an empty message is no message. An accumulator of dK/dV goes from
contributor to contributor within a window (``all_gather``: not at all), and the last one sends it straight home, while
others work on; a rank's own share never travels. Were it to go on to the next window, that would have to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from lightning_longctx.plan.communication import ScheduleName
from lightning_longctx.plan.parcels import ParcelIds, Parcels, phases
from lightning_longctx.plan.steps import Channel, Hop, Schedule, Slot, Step, Timed


@dataclass(frozen=True)
class DoubleRing:
    """The message tables of one attention call over ``windows`` x ``inner`` ranks.

    Args:
        windows: Number of inner rings.
        inner: Ranks in each.
        parcels: Who needs what, by home.
        direction: -1 passes keys to earlier ranks, +1 to later ones.
        route: From whom a rank gets its keys.
        keep_kv: What came from other windows in forward is there in backward.
        parts: Rounds in which a window passes through another.
    """

    windows: int
    inner: int
    parcels: Parcels
    direction: Literal[-1, 1] = -1
    route: ScheduleName = "double_ring"
    keep_kv: bool = False
    parts: int = 1

    def schedule(self, rank: int, *, backward: bool) -> Schedule:
        """Cut one rank's view out of the tables."""
        slots = self.backward_slots if backward else self.forward_slots
        keys = _View.of(self.backward_keys if backward else self.forward_keys, rank)
        grads = _View.of(self.gradients if backward else (), rank)
        kept = {self.forward_slots[t.due_slot]: t.hop for t in self._kept if t.hop.target == rank} if backward else {}
        steps = []
        for index, slot in enumerate(slots):
            home = self.home(slot, rank)
            steps.append(
                Step(
                    home=home,
                    parcels=self._wanted(slot, rank, home),
                    arrival=kept.get(slot) or next((t.hop for t in keys.incoming if t.due_slot == index), None),
                    is_kept=slot in kept,
                    share=slot.share,
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
        """One half of the own window, the foreign windows, the other half; of the own block, too, half at each end.

        The first transfers hide behind the one half, and the last gradients go home behind the other. What was kept
        needs no transfer to hide, so foreign windows come first then.
        """
        own, *rest = self._own_window
        first, last = own._replace(share="first"), own._replace(share="last")
        if self.windows * self.inner == 1:
            return (own,)
        if self.keep_kv:
            return (*self._foreign_windows, first, *rest, last)
        middle = len(rest) // 2
        return (first, *rest[:middle], *self._foreign_windows, *rest[middle:], last)

    @cached_property
    def forward_keys(self) -> tuple[Timed, ...]:
        """Every message of the forward pass."""
        return tuple(self._key_hops(self.forward_slots))

    @cached_property
    def backward_keys(self) -> tuple[Timed, ...]:
        """Every message of the backward pass that carries keys and values."""
        kept = {timed.hop for timed in self._kept}
        return tuple(timed for timed in self._key_hops(self.backward_slots) if timed.hop not in kept)

    @cached_property
    def gradients(self) -> tuple[Timed, ...]:
        """Every message of the backward pass that carries gradients."""
        return tuple(self._gradient_hops(self.backward_slots))

    def kept(self, rank: int) -> tuple[Hop, ...]:
        """Messages of the forward pass that ``rank`` keeps for backward, in the order of their arrival."""
        return tuple(timed.hop for timed in self._kept if timed.hop.target == rank)

    @cached_property
    def _kept(self) -> tuple[Timed, ...]:
        return tuple(t for t in self.forward_keys if t.hop.channel == "kv_outer") if self.keep_kv else ()

    @property
    def _own_window(self) -> tuple[Slot, ...]:
        return tuple(Slot(0, None, s) for s in range(self.inner))

    @property
    def _foreign_windows(self) -> tuple[Slot, ...]:
        parts = range(self._num_parts)
        return tuple(Slot(j, part, s) for j in range(1, self.windows) for part in parts for s in range(self.inner))

    @cached_property
    def window_slots(self) -> int:
        """Slots from when a block is sent to another window until all of it has been worked on there."""
        return self.inner + self.inner * self._num_parts

    @cached_property
    def _num_parts(self) -> int:
        return 1 + max((part for home in self._parts for part in home), default=0)

    @cached_property
    def _parts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(phases(parcels, self.parts) for parcels in self.parcels)

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

    def _wanted(self, slot: Slot, rank: int, home: int) -> ParcelIds:
        return self._in_part(slot, home, (p for p, parcel in enumerate(self.parcels[home]) if rank in parcel.wanted_by))

    def _in_part(self, slot: Slot, home: int, parcels: Iterator[int]) -> ParcelIds:
        return tuple(p for p in parcels if slot.part is None or self._parts[home][p] == slot.part)

    @cached_property
    def _carried(self) -> dict[tuple[int, int, int], frozenset[int]]:
        """By home, window and inner distance: parcels that come by there."""
        carried: dict[tuple[int, int, int], frozenset[int]] = {}
        for home, parcels in enumerate(self.parcels):
            beyond: frozenset[int] = frozenset()
            for j in reversed(range(self.windows)):
                later: frozenset[int] = frozenset()
                for s in reversed(range(self.inner)):
                    stop = self.holder(Slot(j, None, s), home)
                    wanted = frozenset(p for p, parcel in enumerate(parcels) if stop in parcel.wanted_by)
                    later = later | wanted
                    relayed = self.route == "double_ring" or (self.route == "direct" and s == 0)
                    carried[home, j, s] = later if relayed else wanted
                if self.route == "double_ring":
                    beyond = carried[home, j, 0] = carried[home, j, 0] | beyond
        return carried

    def _key_hops(self, slots: tuple[Slot, ...]) -> Iterator[Timed]:
        own = self._own_window[0]
        when = {slot: index for index, slot in enumerate(slots)}
        when.setdefault(own, when.get(own._replace(share="first"), 0))
        for due, slot in enumerate(slots):
            if slot._replace(share="all") == own:
                continue
            before, posted = self._origin(slot, due, when)
            for home in range(self.windows * self.inner):
                if parcels := self._in_part(slot, home, iter(sorted(self._carried[home, slot.window, slot.inner]))):
                    source, target = self.holder(before, home), self.holder(slot, home)
                    channel: Channel = "kv_inner" if self._same_window(source, target) else "kv_outer"
                    yield Timed(posted, posted, due, Hop(channel, source, target, home, parcels))

    def _origin(self, slot: Slot, due: int, when: dict[Slot, int]) -> tuple[Slot, int]:
        """In which slot the sender has, or had, what is worked on in ``slot``; and when it sends."""
        own = self._own_window[0]
        if self.route == "all_gather":
            return own, 0
        if slot.inner:
            # An own block is always at hand; one that is passing through is passed on while it is here.
            at = slot.inner - 1 if self.route == "double_ring" else 0
            before = slot._replace(inner=at)
            return before, when[before] if slot.window or self.route == "double_ring" else max(0, due - 1)
        earlier = Slot(slot.window - 1, slot.part if slot.window > 1 else None, 0)
        # Posted a whole inner rotation ahead: it travels behind that. A block from the window before is passed on the
        # moment it is in.
        return (earlier if self.route == "double_ring" else own), when[earlier]

    def _gradient_hops(self, slots: tuple[Slot, ...]) -> list[Timed]:
        hops: list[Timed] = []
        for home, parcels in enumerate(self.parcels):
            together: dict[tuple[int, int], list[int]] = {}
            for p, parcel in enumerate(parcels):
                for visits in self._chains(slots, home, p, parcel.wanted_by):
                    for sent, due in pairwise([*visits, len(slots)]):
                        together.setdefault((sent, due), []).append(p)
            hops += [self._gradient_hop(slots, sent, due, home, tuple(ids)) for (sent, due), ids in together.items()]
        return sorted(hops)

    def _chains(self, slots: tuple[Slot, ...], home: int, p: int, wanted_by: frozenset[int]) -> list[list[int]]:
        """Slots in which some rank but ``home`` has work with a parcel, in time order, by the sum they add to."""
        chains: dict[int, list[int]] = {}
        for index, slot in enumerate(slots):
            if (slot.part is None or self._parts[home][p] == slot.part) and self.holder(slot, home) in wanted_by:
                chain = index if self.route == "all_gather" else slot.window
                chains.setdefault(chain, []).append(index)
        return list(chains.values())

    def _gradient_hop(self, slots: tuple[Slot, ...], sent: int, due: int, home: int, parcels: ParcelIds) -> Timed:
        source = self.holder(slots[sent], home)
        if due == len(slots):
            return Timed(0, sent, due, Hop("grad_home", source, home, home, parcels))
        return Timed(sent, sent, due, Hop("grad_inner", source, self.holder(slots[due], home), home, parcels))

    def _same_window(self, one: int, other: int) -> bool:
        return one // self.inner == other // self.inner


class _View(NamedTuple):
    incoming: list[Timed]
    outgoing: list[Timed]

    @staticmethod
    def of(hops: tuple[Timed, ...], rank: int) -> _View:
        return _View([t for t in hops if t.hop.target == rank], [t for t in hops if t.hop.source == rank])
