"""Arithmetic on ascending ranges of positions."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[range, ...]
"""What one rank holds: ascending, disjoint ranges of global positions, in local order."""


def chunks(length: int, count: int) -> list[range]:
    """Cut ``range(length)`` into ``count`` neighbours; the first ones are a token longer if it does not divide."""
    base, extra = divmod(length, count)
    starts = [index * base + min(index, extra) for index in range(count + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def zigzag_chunks(whole: range, num_ranks: int, dealt: int = 0) -> list[Ranges]:
    """Rank r gets chunks r and 2P-1-r of 2P.

    Args:
        whole: What to cut; step 1.
        num_ranks: P.
        dealt: Leftover tokens visit ranks ``dealt, dealt + 1, ...`` with their early chunks, then with their late ones.
    """
    base, extra = divmod(len(whole), 2 * num_ranks)
    turns = [(rank - dealt) % num_ranks for rank in range(num_ranks)]
    early = [base + (turn < extra) for turn in turns]
    late = [base + (num_ranks + turn < extra) for turn in turns]
    pieces, start = [], whole.start
    for size in early + late[::-1]:
        pieces.append(range(start, start + size))
        start += size
    return [(pieces[rank], pieces[-1 - rank]) for rank in range(num_ranks)]


def joined(pieces: Iterable[range]) -> Ranges:
    """The same positions with neighbouring ranges of step 1 made one, and empty ones dropped."""
    result: list[range] = []
    for piece in pieces:
        if result and result[-1].step == piece.step == 1 and result[-1].stop == piece.start:
            result[-1] = range(result[-1].start, piece.stop)
        elif piece:
            result.append(piece)
    return tuple(result)


def shifted(ranges: Iterable[range], by: int) -> Ranges:
    """Every range moved by ``by`` positions."""
    return tuple(range(piece.start + by, piece.stop + by, piece.step) for piece in ranges)


def cut(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The positions at local indices ``start:stop``."""
    result, offset = [], 0
    for piece in ranges:
        result.append(piece[max(0, start - offset) : max(0, stop - offset)])
        offset += len(piece)
    return tuple(piece for piece in result if piece)
