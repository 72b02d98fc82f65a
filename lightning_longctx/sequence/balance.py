"""The ``balanced`` layout: whole documents where possible, the same tokens and about the same work for every rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.ranges import Ranges, chunks, joined

PAIRS_PER_TOKEN = 128
"""What a token costs whose keys and values must come from another rank, in visible (query, key) pairs."""
PAIRS_PER_PIECE = 64 * 64
"""What another piece of a document that is cut costs: kernels compute in blocks."""
SMALL_PIECE = 32
"""Tokens under which a piece is not worth its tiles."""
GOOD_ENOUGH = 1.01
"""Most work of a rank over the mean at which nothing better is looked for."""


def balanced_ranges(documents: Documents, num_ranks: int) -> list[Ranges]:
    """Place documents on ranks: whole where they fit, the others cut so that tokens and causal work are even.

    Documents with more tokens or more work than a rank's part are cut over as few ranks as can do them, the others go,
    longest first, to the rank with the least work that has room. Some may be held back to fill what is left, cut in a
    zigzag whose two chunks a rank give it exactly the tokens and about the work that it lacks. Several choices of those
    are tried; the one with the lowest estimate of time is taken. Deterministic.

    Args:
        documents: Cumulative lengths, ``(0, ..., total)``.
        num_ranks: P.

    Returns:
        For each rank ascending ranges of ``total // P`` positions; the first ``total % P`` ranks hold one more.
    """
    spans = [range(start, stop) for start, stop in pairwise(documents) if start < stop]
    spans.sort(key=lambda span: (-len(span), span.start))
    best: _Draft | None = None
    for held_back in _tries(len(spans)):
        draft = _draft(spans, num_ranks, held_back)
        if best is None or draft.cost < best.cost:
            best = draft
        if best.cost <= GOOD_ENOUGH * best.mean_work:
            break
    assert best is not None
    return [joined(sorted(pieces, key=lambda piece: piece.start)) for pieces in best.pieces]


def _tries(num_documents: int) -> list[range]:
    """Which documents to hold back, longest first; fewer tries where there are many: a collate worker has to keep up.

    One of middling length evens out as much as is missing where many are packed, and fewer of its tokens are sent.
    """
    starts = [(0, 0), (0, 1), (num_documents // 8, 1), (num_documents // 4, 1)]
    starts += [(0, count) for count in (2, 4, 8, 16, 32, 64)]
    tries = dict.fromkeys(range(start, start + count) for start, count in starts if start + count <= num_documents)
    return list(tries)[: max(2, 20_000 // max(num_documents, 1))]


def num_pairs(start: int, stop: int) -> int:
    """Visible pairs of the queries ``start:stop`` of one document under a causal mask."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


class _Draft:
    """Who holds what so far."""

    def __init__(self, total: int, num_ranks: int, mean_work: float) -> None:
        self.mean_work = mean_work
        self.pieces: list[list[range]] = [[] for _ in range(num_ranks)]
        self.room = [len(chunk) for chunk in chunks(total, num_ranks)]
        self.work = [0] * num_ranks
        self.charge = [0] * num_ranks

    @property
    def cost(self) -> int:
        """Estimated time of the slowest rank, in pairs."""
        return max(map(sum, zip(self.work, self.charge, strict=True)))

    def place(self, rank: int, span: range, start: int, stop: int) -> None:
        """Put ``start:stop`` of a document on a rank."""
        if start < stop:
            self.pieces[rank].append(span[start:stop])
            self.room[rank] -= stop - start
            self.work[rank] += num_pairs(start, stop)

    def cut(self, span: range, ranks: Sequence[int], tokens: Sequence[int]) -> None:
        """Cut a document over ranks: each gets its tokens, in an early and a late chunk that even out the work.

        Ranks nest, the first outermost. That a rank's early chunk is a token longer, and its late one a token shorter,
        changes its work by the constant distance between them, so the length of the early chunk has a closed form.
        """
        left, right = 0, len(span)
        level = (sum(self.work[rank] for rank in ranks) + num_pairs(left, right)) / len(ranks)
        wanted = {rank: level - self.work[rank] for rank in ranks}
        share = dict(zip(ranks, tokens, strict=True))
        # The outermost chunks reach furthest in both directions: they go to ranks that want unusually much or little.
        order = sorted(ranks, key=lambda rank: (-abs(wanted[rank] - share[rank] * right / 2), rank))
        for index, rank in enumerate(order):
            rest = order[index:]
            surplus = (num_pairs(left, right) - sum(wanted[other] for other in rest)) / len(rest)
            if not share[rank]:
                continue
            early = _early_tokens(left, right, share[rank], wanted[rank] + surplus)
            late = share[rank] - early
            received = (right if late else left + early) - share[rank]
            self.place(rank, span, left, left + early)
            self.place(rank, span, right - late, right)
            self.charge[rank] += PAIRS_PER_TOKEN * received + PAIRS_PER_PIECE * ((early > 0) + (late > 0))
            left, right = left + early, right - late


def _early_tokens(left: int, right: int, tokens: int, work: float) -> int:
    """How many of a rank's ``tokens`` come from the start of ``left:right``, the others from its end."""
    distance = right - left - tokens
    if not distance:
        return tokens
    early = round((num_pairs(right - tokens, right) - work) / distance)
    if early < SMALL_PIECE:
        return 0
    return tokens if tokens - early < SMALL_PIECE else early


def _draft(spans: Sequence[range], num_ranks: int, held_back: range) -> _Draft:
    """Cut what is too long, place the others whole, fill up with what fits nowhere and then with what is held back.

    Args:
        spans: Documents, longest first.
        num_ranks: P.
        held_back: Indices into ``spans``.
    """
    total = sum(map(len, spans))
    mean_work = sum(num_pairs(0, len(span)) for span in spans) / num_ranks
    draft = _Draft(total, num_ranks, mean_work)
    others = [*spans[: held_back.start], *spans[held_back.stop :]]
    too_long = [span for span in others if len(span) > draft.room[-1] or num_pairs(0, len(span)) > 1.1 * mean_work]
    for span in too_long:
        _cut_over_few(draft, span)
    for span in _place_whole(draft, others[len(too_long) :]):
        _cut_over_few(draft, span)
    for span in reversed(spans[held_back.start : held_back.stop]):
        ranks = [rank for rank in range(num_ranks) if draft.room[rank]]
        draft.cut(span, ranks, _proportional(len(span), [draft.room[rank] for rank in ranks]))
    return draft


def _place_whole(draft: _Draft, spans: Iterable[range]) -> list[range]:
    """Each onto the rank with the least work that has room; return what fits nowhere."""
    homeless = []
    queue = [(work, rank) for rank, work in enumerate(draft.work) if draft.room[rank]]
    heapq.heapify(queue)
    for span in spans:
        size, full = len(span), []
        while queue and draft.room[queue[0][1]] < size:
            full.append(heapq.heappop(queue))
        if queue:
            rank = queue[0][1]
            draft.place(rank, span, 0, size)
            entry = (draft.work[rank], rank)
            heapq.heapreplace(queue, entry) if draft.room[rank] else heapq.heappop(queue)
        else:
            homeless.append(span)
        for entry in full:
            heapq.heappush(queue, entry)
    return homeless


def _cut_over_few(draft: _Draft, span: range) -> None:
    """Cut a document over the fewest ranks that have room for it and stay under the mean work, idlest ones first."""
    size = len(span)
    by_work = sorted((rank for rank, room in enumerate(draft.room) if room), key=lambda rank: (draft.work[rank], rank))
    rooms = accumulate(draft.room[rank] for rank in by_work)
    works = accumulate(draft.mean_work - draft.work[rank] for rank in by_work)
    fits = [room >= size and work >= 0.99 * num_pairs(0, size) for room, work in zip(rooms, works, strict=True)]
    if any(fits):
        ranks = by_work[: fits.index(True) + 1]
    else:
        by_room = sorted(by_work, key=lambda rank: (-draft.room[rank], rank))
        enough = [room >= size for room in accumulate(draft.room[rank] for rank in by_room)]
        ranks = by_room[: enough.index(True) + 1]
    draft.cut(span, ranks, _proportional(size, [draft.room[rank] for rank in ranks]))


def _proportional(total: int, rooms: Sequence[int]) -> list[int]:
    """Cut a number in proportion to rooms that hold it; no part exceeds its room."""
    edges = [total * room // sum(rooms) for room in accumulate(rooms, initial=0)]
    return [stop - start for start, stop in pairwise(edges)]
