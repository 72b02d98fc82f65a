"""Which bytes of a growing range are taken: places for what waits, used again and again. Pure."""

from __future__ import annotations

from bisect import bisect


class Slots:
    """First fit. Neighbouring free slots are one, and the range shrinks when its end is free.

    So it is never longer than what waited in it at one time, but for holes that nothing fitted into.

    Args:
        alignment: Slots begin at its multiples.
        limit: Bytes that the range may have; ``None`` lets it grow for ever.
    """

    def __init__(self, alignment: int, limit: int | None = None) -> None:
        self.end = 0
        self._alignment, self._limit = alignment, limit
        self._taken: dict[int, int] = {}
        self._free: list[tuple[int, int]] = []

    @property
    def num_taken(self) -> int:
        """How many slots are in use."""
        return len(self._taken)

    def take(self, num_bytes: int) -> int | None:
        """Where a slot of that many bytes begins; none if the limit does not allow one."""
        size = max(1, -(-num_bytes // self._alignment)) * self._alignment
        for place, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[place : place + 1] = [(start + size, stop)] if stop - start > size else []
                self._taken[start] = start + size
                return start
        if self._limit is not None and self.end + size > self._limit:
            return None
        start, self.end = self.end, self.end + size
        self._taken[start] = self.end
        return start

    def give(self, start: int) -> None:
        """Free the slot that begins there."""
        stop = self._taken.pop(start)
        place = bisect(self._free, (start, stop))
        if place < len(self._free) and self._free[place][0] == stop:
            stop = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            place -= 1
            start = self._free.pop(place)[0]
        if stop == self.end:
            self.end = start
        else:
            self._free.insert(place, (start, stop))
