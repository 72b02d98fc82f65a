"""A rank's ranges, cut where documents begin: within a piece and between two of them one band is the whole mask."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.ranges import Ranges


class Piece(NamedTuple):
    """Neighbouring tokens of one document on one rank.

    Args:
        positions: Their global positions.
        start: Local index of the first of them.
        document: Which document they belong to.
    """

    positions: range
    start: int
    document: int

    @property
    def stop(self) -> int:
        """Local index after the last."""
        return self.start + len(self.positions)


Pieces = tuple[Piece, ...]


def cut_pieces(ranges: Ranges, documents: Documents = ()) -> Pieces:
    """The pieces of a shard, in local order.

    Args:
        ranges: What the rank holds.
        documents: Cumulative lengths; empty is one document.
    """
    pieces, start = [], 0
    for whole in ranges:
        for document, positions in _cut(whole, documents) if documents else [(0, whole)]:
            pieces.append(Piece(positions, start, document))
            start += len(positions)
    return tuple(pieces)


def by_document(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    """Pieces of every document, in the order given."""
    groups: defaultdict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        groups[piece.document].append(piece)
    return groups


def select(pieces: Pieces, intervals: Iterable[tuple[int, int]]) -> Pieces:
    """What is left of pieces if only the local ``intervals`` are held, one after another: ``start`` counts along."""
    selected: list[Piece] = []
    held = 0
    starts = [piece.start for piece in pieces]
    for first, last in intervals:
        for piece in pieces[max(0, bisect_right(starts, first) - 1) :]:
            if piece.start >= last:
                break
            positions = piece.positions[max(0, first - piece.start) : last - piece.start]
            if not positions:
                continue
            before = selected[-1] if selected else None
            if before and before.document == piece.document and _follows(before.positions, positions):
                whole = range(before.positions.start, positions.stop, positions.step)
                selected[-1] = Piece(whole, before.start, piece.document)
            else:
                selected.append(Piece(positions, held, piece.document))
            held += len(positions)
    return tuple(selected)


def _follows(first: range, second: range) -> bool:
    return first.step == second.step and second.start == first[-1] + first.step


def _cut(whole: range, documents: Documents) -> Iterable[tuple[int, range]]:
    index = bisect_right(documents, whole.start) - 1
    while whole:
        count = -(-(documents[index + 1] - whole.start) // whole.step)
        if head := whole[:count]:
            yield index, head
        whole, index = whole[count:], index + 1
