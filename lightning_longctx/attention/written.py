"""Which tokens of a sum have been written: the first part is stored, only later ones are added."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from lightning_longctx.plan.stacks import Span


class Part(NamedTuple):
    """The tokens ``first:last`` of each of ``count`` slices of a span, from ``index`` on."""

    index: int
    count: int
    first: int
    last: int
    fresh: bool
    """Not written before."""


class Written:
    """Marks on the tokens ``0 ... size - 1``. Memory that is stored to first needs no clearing before."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._starts: list[int] = []  # of the runs that are written, in order; no two touch
        self._stops: list[int] = []

    def mark(self, span: Span) -> list[Part]:
        """Mark a span; returns its parts, as few as there can be."""
        slices = [self._mark(span.start + i * span.step, span.size) for i in range(span.count)]
        if span.count == 1:
            return slices[0]
        if all(len(parts) == 1 and parts[0].fresh == slices[0][0].fresh for parts in slices):
            return [Part(0, span.count, 0, span.size, slices[0][0].fresh)]
        return [part._replace(index=i) for i, parts in enumerate(slices) for part in parts]

    def _mark(self, start: int, size: int) -> list[Part]:
        stop = start + size
        low, high = bisect_left(self._stops, start), bisect_right(self._starts, stop)  # runs that touch it
        runs = list(zip(self._starts[low:high], self._stops[low:high], strict=True))
        if len(runs) == 1 and runs[0][0] <= start and stop <= runs[0][1]:
            return [Part(0, 1, 0, size, False)]
        self._starts[low:high] = [min([start, *self._starts[low:high]])]
        self._stops[low:high] = [max([stop, *self._stops[low:high]])]
        parts, done = [], start
        for first, last in (*runs, (stop, stop)):
            first, last = max(first, start), min(last, stop)
            if done < first:
                parts.append(Part(0, 1, done - start, first - start, True))
            if first < last:
                parts.append(Part(0, 1, first - start, last - start, False))
            done = max(done, last)
        return parts

    def gaps(self) -> list[tuple[int, int]]:
        """Parts that were never marked."""
        between = zip([0, *self._stops], [*self._starts, self._size], strict=True)
        return [(first, last) for first, last in between if first < last]
