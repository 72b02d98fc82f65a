"""Attention dropout that every layout, every degree and every recomputation draws alike.

No generator has a state here: whether a weight stays is a hash of (seed, call, row, head, query, key), all of them
global numbers (counter-based generation, after Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"). Two words
are hashed for every query row; a key's weight then costs two more rounds (``backends.dropping``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_longctx import _upstream
from lightning_longctx.attention.backends.contract import Dropout
from lightning_longctx.attention.backends.dropping import WORD, mix

_SALTS = (0x9E3779B9, 0x85EBCA6B)
"""Where the chains of a row's two words begin."""


def row_words(seed: int, rows: Tensor, heads: Tensor, positions: Tensor) -> Tensor:
    """Two words for every query row.

    Args:
        seed: Of one attention call, 63 bits.
        rows: [B, T] or [B, 1], which row of the global batch a query belongs to.
        heads: [H], global query heads.
        positions: [T], positions of the queries in their rows.

    Returns:
        [B, H, T, 2] int64, below 2^32.
    """
    numbers = (rows[:, None, :], heads[None, :, None], positions[None, None, :])
    chains = []
    for salt in _SALTS:
        word = torch.tensor(salt, dtype=torch.int64, device=positions.device)
        for number in (seed & WORD, seed >> 32, *numbers):
            word = mix(word ^ number)
        chains.append(word)
    return torch.stack(chains, dim=-1)


@dataclass(frozen=True)
class CallDropout:
    """The dropout of one attention call, before it meets queries and keys.

    Args:
        p: Probability.
        seed: Of the call.
        first_head: Global number of the first query head here.
        first_row: As in ``StepDraws``.
        row_step: As in ``StepDraws``.
        length: Of a row, where rows follow one another as one long sequence (``SequenceRecord.num_rows``); else None.
    """

    p: float
    seed: int
    first_head: int = 0
    first_row: int = 0
    row_step: int = 1
    length: int | None = None

    def of_queries(self, query: Tensor, ranges: Iterable[range]) -> Dropout:
        """With the words of all of this rank's queries, [B, Hq, T, D], which stand at ``ranges``; no keys yet."""
        positions = positions_of(ranges, query.device)
        rows = torch.arange(query.shape[0], device=query.device)[:, None]
        if self.length is not None:
            rows, positions = (positions // self.length)[None], positions % self.length
        rows = self.first_row + self.row_step * rows
        heads = torch.arange(self.first_head, self.first_head + query.shape[1], device=query.device)
        return Dropout(self.p, row_words(self.seed, rows, heads, positions), positions[:0])

    def with_keys(self, dropout: Dropout, ranges: Iterable[range]) -> Dropout:
        """The same queries with the keys that stand at ``ranges``: in the queries' own row, or nothing sees them."""
        positions = positions_of(ranges, dropout.rows.device)
        return replace(dropout, keys=positions if self.length is None else positions % self.length)


def positions_of(ranges: Iterable[range], device: torch.device) -> Tensor:
    """One after another, [T] int64."""
    parts = [torch.arange(part.start, part.stop, part.step) for part in ranges]
    return torch.cat(parts or [torch.arange(0)]).to(device)


def check_probability(p: float) -> None:
    """Raise ``ValueError`` unless ``p`` is a probability of dropping that leaves something."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout_p={p} must be at least 0 and below 1.")


@dataclass(frozen=True, eq=False)
class StepDraws:
    """What the attention calls of one training step draw from; the same on all ranks that share sequences.

    Args:
        seed: Of the step.
        first_row: Row of the global batch that is this rank's first,
        row_step: and how many rows further its next one is: samplers deal rows to data ranks in turn.
    """

    seed: int
    first_row: int = 0
    row_step: int = 1
    _calls: dict[int, int] = field(default_factory=dict)

    def number(self) -> int:
        """Which call of the step this is; in a recomputation, which one it was.

        The torch generator of a rank is drawn from for a ticket. Other ranks draw other tickets, but as many; and
        checkpointing restores the generator before it calls again, so that the same ticket comes up.

        Raises:
            ValueError: A recomputation draws a ticket that has not been there.
        """
        ticket = int(torch.randint(2**62, ()))
        if _upstream.in_backward() and ticket not in self._calls:
            raise ValueError(
                "attention with dropout is recomputed in backward, but torch's generator was not restored: another "
                "mask would be drawn than in forward. Leave preserve_rng_state=True in checkpoint()."
            )
        return self._calls.setdefault(ticket, len(self._calls))


_open: list[StepDraws] = []


@contextmanager
def drawing(draws: StepDraws) -> Iterator[None]:
    """Inside, attention calls of this process draw from ``draws``; open it around forward and around backward."""
    _open.append(draws)
    try:
        yield
    finally:
        _open.remove(draws)


def drawn(num_ranks: int, first_head: int) -> Tensor:
    """The numbers of one call's dropout, as they enter the custom op: int64 [4] on the CPU.

    Args:
        num_ranks: How many ranks share the sequence.
        first_head: Global number of the first query head that is computed here.

    Returns:
        Seed of the call, ``first_head``, first row and row step (see ``StepDraws``).

    Raises:
        ValueError: Ranks share the sequence, but no step is open: they would draw unlike numbers.
    """
    if _open:
        draws = _open[-1]
        seed, rows = mixed_seed(draws.seed, draws.number()), (draws.first_row, draws.row_step)
    elif num_ranks == 1:
        seed, rows = int(torch.randint(2**62, ())), (0, 1)
    else:
        raise ValueError(
            f"dropout_p is above 0 in attention over {num_ranks} ranks, outside of a training step of "
            "LongContextStrategy: the ranks would not agree on what is dropped. Use dropout_p=0 here, or open "
            "attention.dropout.drawing(StepDraws(seed)) with one seed on all ranks around forward and backward."
        )
    return torch.tensor([seed, first_head, *rows], dtype=torch.int64)


def mixed_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers (FNV-1a over 64-bit words)."""
    mixed = 0xCBF29CE484222325
    for number in numbers:
        mixed = ((mixed ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return mixed >> 1
