"""Which tokens of a sum have been written: the first part is stored, only later ones are added."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
        self._marks = np.zeros(size, dtype=bool)

    def mark(self, span: Span) -> list[Part]:
        """Mark a span; returns its parts, as few as there can be."""
        slices = [self._mark(span.start + i * span.step, span.size) for i in range(span.count)]
        alike = all(len(parts) == 1 and parts[0].fresh == slices[0][0].fresh for parts in slices)
        if alike:
            return [Part(0, span.count, 0, span.size, slices[0][0].fresh)]
        return [part._replace(index=i) for i, parts in enumerate(slices) for part in parts]

    def _mark(self, start: int, size: int) -> list[Part]:
        marks = self._marks[start : start + size]
        if marks.all():
            return [Part(0, 1, 0, size, False)]
        parts = [Part(0, 1, *run) for run in _runs(~marks)] if marks.any() else [Part(0, 1, 0, size, True)]
        marks[:] = True
        return parts

    def gaps(self) -> list[tuple[int, int]]:
        """Parts that were never marked."""
        if self._marks.all():
            return []
        return [(first, last) for first, last, fresh in _runs(~self._marks) if fresh]


def _runs(values: np.ndarray) -> list[tuple[int, int, bool]]:
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [(first, last, bool(values[first])) for first, last in zip(edges, edges[1:], strict=False)]
