"""What ranks leave in the run's store when they end, for those that wonder why a connection has closed."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from lightning_longctx.attention.peer_errors import Cause

T = TypeVar("T")

STORE_SECONDS = 2.0
_POLL_SECONDS = 0.05


class Card(NamedTuple):
    """How to find the process of a rank."""

    machine: str
    """The same only for processes that see each other's ids."""
    process: int


@dataclass(frozen=True)
class Report:
    """Why a rank ends.

    Args:
        text: Its error, in one line.
        cause: ``late`` or ``lost`` if the error is about another rank; None for an error of its own.
        place: Where it waited for others.
        ranks: With whom.
    """

    text: str
    cause: Cause | None = None
    place: str = ""
    ranks: tuple[int, ...] = ()


class Reports:
    """Leaves and reads reports of one run; never raises, since whoever asks has an error of its own to show.

    Args:
        store: Shared by all ranks.
        rank: This one.
        cards: By rank.
        run: Tells this run's entries from those of others in the same store.
    """

    def __init__(self, store: dist.Store, rank: int, cards: Sequence[Card], run: str) -> None:
        self._store = store
        self._rank = rank
        self._cards = cards
        self._run = run

    def leave(self, report: Report) -> None:
        """Tell the others why this rank ends."""
        text = json.dumps(asdict(report))
        _within(STORE_SECONDS, lambda: self._store.set(self._key("end", self._rank), text), None)

    def read(self) -> dict[int, Report]:
        """Reports of other ranks so far."""
        return _within(STORE_SECONDS, self._read, {})

    def gone(self) -> list[int]:
        """Ranks of this machine whose process has ended; of other machines nobody knows."""
        mine = self._cards[self._rank].machine
        return [rank for rank, card in enumerate(self._cards) if card.machine == mine and not is_alive(card.process)]

    def process_of(self, rank: int) -> int:
        """Process id, on its machine."""
        return self._cards[rank].process

    def all_meet(self, place: str, seconds: float) -> bool:
        """Wait for all ranks to come to ``place``: whether they did, which is the same on all that came.

        Who has waited for so many seconds, or knows of a rank that is gone, calls it off for all.
        """
        deadline, outcome = time.monotonic() + seconds, self._key(place, "outcome")

        def come() -> None:
            if self._store.add(self._key(place, "came"), 1) == len(self._cards):
                self._store.compare_set(outcome, "", "met")

        def decided() -> bool:
            return self._store.check([outcome])

        _within(STORE_SECONDS, come, None)
        while time.monotonic() < deadline and not self.gone() and not _within(STORE_SECONDS, decided, False):
            time.sleep(_POLL_SECONDS)
        return _within(STORE_SECONDS, lambda: self._store.compare_set(outcome, "", "called off"), b"") == b"met"

    def _key(self, what: str, rank: int | str) -> str:
        return f"longctx/{self._run}/{what}/{rank}"

    def _read(self) -> dict[int, Report]:
        found = {}
        for rank in range(len(self._cards)):
            if rank != self._rank and self._store.check([key := self._key("end", rank)]):
                values = json.loads(self._store.get(key))
                found[rank] = Report(**values | {"ranks": tuple(values["ranks"])})
        return found


def open_reports() -> Reports:
    """Exchange cards; a collective over the world."""
    from lightning_longctx._upstream import default_store

    cards = [None] * dist.get_world_size()
    dist.all_gather_object(cards, (_machine(), os.getpid(), secrets.token_hex(8)))
    store = default_store()
    known = [Card(machine, process) for machine, process, _ in cards]  # type: ignore[misc]
    return Reports(store, dist.get_rank(), known, cards[0][2])  # type: ignore[index]


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _machine() -> str:
    """Names the set of processes in which an id means the same: this boot, and this container."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists() and space.exists():
        return f"{boot.read_text().strip()}/{os.readlink(space)}"
    return secrets.token_hex(16)  # nothing is known of others then


def _within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """The store lives in another process, which may be gone, or stand still: then go on without it."""
    result = [otherwise]

    def ask() -> None:
        try:
            result[0] = call()
        except (RuntimeError, ValueError):  # what torch raises if the store does not answer
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return result[0]
