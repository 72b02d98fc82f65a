"""What position ids say: where documents begin. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx.sequence.documents import Documents, document_offsets


def row_positions(position_ids: Tensor, tokens: tuple[int, int], hidden: Tensor | None = None) -> Tensor:
    """Position ids as int64 [B, S]; ones of three or more dims stay what they are.

    Args:
        position_ids: [S], [1, S] or [B, S]; or more dims, of which the last is the sequence.
        tokens: (B, S) of the batch.
        hidden: [B, S] booleans: padding at the tail of rows. Positions there count on from the row's last token
            whatever they were, so that padding never makes documents.

    Raises:
        ValueError: Another shape.
    """
    position_ids = position_ids.to(torch.int64)
    if position_ids.ndim > 2:
        return position_ids
    if tuple(position_ids.shape) not in (tokens[1:], (1, tokens[1]), tokens):
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} must be [S], [1, S] or [B, S] with (B, S) = {tokens}, "
            "or have a third dim in front of those. Correct them in collate_fn, or leave them out."
        )
    positions = position_ids.expand(tokens)
    if hidden is None:
        return positions
    last = (~hidden).sum(dim=1, keepdim=True).clamp(min=1) - 1
    beyond = torch.arange(tokens[1], device=positions.device) - last.to(positions.device)
    return torch.where(beyond > 0, positions.gather(1, last.to(positions.device)) + beyond, positions)


def row_lengths(position_ids: Tensor, hidden: Tensor | None = None) -> tuple[int, ...]:
    """Highest position of every row plus one, without padding: ``row_lengths`` of a ``SequenceRecord``.

    Args:
        position_ids: As ``row_positions`` returns them, before padding to a multiple of the degrees.
        hidden: [B, S] booleans: padding at the tail of rows.

    Returns:
        One number if all rows agree, else one for each; none for positions that are not [B, S].
    """
    if position_ids.ndim != 2:
        return ()
    seen = position_ids if hidden is None else position_ids.masked_fill(hidden.to(position_ids.device), -1)
    lengths = (seen.amax(dim=1) + 1).tolist()
    return tuple(lengths[:1] if len(set(lengths)) == 1 else lengths)


def document_starts(position_ids: Tensor) -> Tensor:
    """Where in [B, S] positions a document begins, as booleans: at every row's start, and where positions do not go on.

    The rule of ``sequence.documents.document_offsets``.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def find_documents(position_ids: Tensor) -> tuple[Documents, int]:
    """The documents packed into rows.

    Args:
        position_ids: [B, S], which count on inside documents only.

    Returns:
        ``documents`` and ``num_rows`` of a ``SequenceRecord``: along one row and 1 if all rows are alike (empty if
        each is one document), else along all rows one after another and B.
    """
    rows = [tuple(document_offsets(row).tolist()) for row in position_ids.cpu()]
    if len(set(rows)) == 1:
        return (rows[0] if len(rows[0]) > 2 else ()), 1
    length = position_ids.shape[1]
    return (0, *(row * length + end for row, offsets in enumerate(rows) for end in offsets[1:])), len(rows)
