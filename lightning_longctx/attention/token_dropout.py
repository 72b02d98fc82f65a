"""Dropout of hidden states that every layout and every degree draws alike: by a token's place, not by a rank's."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx.attention.backends.contract import Dropout
from lightning_longctx.attention.backends.dropping import keeps
from lightning_longctx.attention.dropout import check_probability, drawn, positions_of, row_words
from lightning_longctx.sequence.ranges import Ranges, cut
from lightning_longctx.sequence.record import SequenceRecord


def token_dropout(states: Tensor, p: float, sequence: SequenceRecord | None = None) -> Tensor:
    """Set numbers of hidden states to 0 with probability ``p``, and make up for it by ``1 / (1 - p)``.

    As ``F.dropout``, but in a training step of ``LongContextStrategy`` the numbers that go are those of one process,
    and go again when the call is recomputed.

    Args:
        states: [B, T, width], of this rank's tokens, or of its part of them where tensor ranks share them evenly.
        p: Probability, at least 0 and below 1; pass 0 in evaluation.
        sequence: The batch's ``sequence`` entry; None: all tokens are here.

    Returns:
        As ``states``.

    Raises:
        ValueError: ``p`` is no such probability, T is neither all of this rank's tokens nor its part of them, or ranks
            share the sequence outside of a step.
    """
    check_probability(p)
    if p == 0:
        return states
    record = sequence or SequenceRecord(length=states.shape[1])
    seed, _, first_row, row_step = drawn(record.num_ranks * record.head * record.tensor, 0).tolist()
    channels = torch.arange(states.shape[2], device=states.device)
    rows = first_row + row_step * torch.arange(states.shape[0], device=states.device)
    ranges = _held(record, states.shape[1])
    groups = [rows] if len(ranges) == 1 else rows.split(1)  # rows that are cut alike
    alone = torch.zeros(1, dtype=torch.int64, device=states.device)
    words = [
        row_words(seed, group[:, None], alone, positions_of(places, states.device))
        for group, places in zip(groups, ranges, strict=True)
    ]
    stays = keeps(Dropout(p, torch.cat(words), channels)).squeeze(1)
    return states.masked_fill(~stays, 0.0) / (1.0 - p)


def _held(record: SequenceRecord, num_tokens: int) -> tuple[Ranges, ...]:
    """The positions of ``num_tokens`` tokens of every row, one entry if rows agree."""
    if num_tokens == record.num_local_tokens:
        return record.row_ranges
    if num_tokens * record.tensor != record.num_local_tokens:
        raise ValueError(
            f"token_dropout got {num_tokens} tokens of a row, but this rank holds {record.num_local_tokens}"
            + (f", or a {record.tensor}th of them" if record.tensor > 1 else "")
            + ". Pass the states of all of them, and the batch's own sequence record."
        )
    start = record.tensor_rank * num_tokens
    return tuple(cut(ranges, start, start + num_tokens) for ranges in record.row_ranges)
