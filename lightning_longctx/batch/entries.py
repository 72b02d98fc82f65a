"""What the entries of a batch are: where their sequence dim is, and what an attention mask hides. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

LABELS = ("labels", "shift_labels", "attention_mask")
TOKENS = ("input_ids", "inputs_embeds")
KNOWN_DIMS = {"input_ids": 1, "inputs_embeds": 1, "labels": 1, "shift_labels": 1, "position_ids": -1}


def tokens_shape(entries: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and tokens per row of a full batch, read from ``input_ids`` or, without them, ``inputs_embeds``.

    Raises:
        ValueError: Neither is there, or its shape is not [B, S] or [B, S, ...].
    """
    key = next((key for key in ("input_ids", "inputs_embeds") if isinstance(entries.get(key), Tensor)), None)
    if key is None:
        raise ValueError(
            f"a batch with entries {sorted(map(str, entries))} has neither a tensor input_ids [B, S] nor inputs_embeds "
            "[B, S, ...]: nothing says how long its sequences are. Rename your tokens in collate_fn."
        )
    shape = tuple(entries[key].shape)
    expected = "[B, S]" if key == "input_ids" else "[B, S, ...]"
    if len(shape) < 2 or (key == "input_ids" and len(shape) != 2) or 0 in shape[:2]:
        raise ValueError(
            f"{key} of shape {shape} must be {expected} with at least one row and one token. A dataset that yields "
            "single sequences needs DataLoader(batch_size=...), or a row dim: input_ids[None]."
        )
    return shape[0], shape[1]


def sequence_dim(key: str, value: Any, tokens: tuple[int, int], configured: Mapping[str, int | None]) -> int | None:
    """The dim on which an entry is cut, from 0; ``None`` leaves it whole.

    ``[B, S, ...]`` is cut on dim 1, and what has no dim of size S stays whole. Anything else could be either.

    Args:
        key: Name of the entry.
        value: The entry; only tensors are cut.
        tokens: (B, S) of the batch.
        configured: Dims the user has settled, by entry.

    Raises:
        ValueError: The shape leaves it open, or contradicts what is configured or known.
    """
    if not isinstance(value, Tensor):
        if configured.get(key) is not None:
            raise ValueError(f"sequence_dims has {key}, but this batch entry is a {type(value).__name__}, no tensor.")
        if key not in configured and _holds_length(value, tokens[1]):
            raise ValueError(
                f"batch entry {key!r} holds tensors with a dim of the sequence's length {tokens[1]}, and only entries "
                f"of the batch itself are cut. Lift them out, or set sequence_dims: {{{key}: null}} to give it whole "
                "to every rank."
            )
        return None
    shape, (rows, length) = tuple(value.shape), tokens
    if key in configured or key in KNOWN_DIMS:
        return _settled_dim(key, shape, length, configured[key] if key in configured else KNOWN_DIMS[key])
    if length not in shape:
        return None
    # A row or feature dim of the same size makes even [B, S, ...] a guess.
    if shape[:2] == (rows, length) and length not in shape[2:]:
        return 1
    raise ValueError(
        f"batch entry {key!r} of shape {shape} has a dim of the sequence's length {length}, but is not [B, S, ...] = "
        f"[{rows}, {length}, ...] without doubt. Say which dim is the sequence with the strategy option sequence_dims: "
        f"{{{key}: {shape.index(length)}}}, or sequence_dims: {{{key}: null}} to give it whole to every rank."
    )


def attention_padding(mask: Any, tokens: tuple[int, int]) -> Tensor | None:
    """Where a 0/1 mask [B, S] hides padding at the tail of rows, as booleans [B, S]; ``None`` if it hides nothing.

    Raises:
        ValueError: The mask is anything else.
    """
    way_out = (
        "Attention here is causal: leave attention_mask out, or pad on the right (tokenizer.padding_side='right')."
    )
    if not isinstance(mask, Tensor) or tuple(mask.shape) != tokens:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask of shape {shape} is not [B, S] = {tokens} and cannot be honoured. {way_out}")
    hidden = mask == 0
    if not (hidden | (mask == 1)).all():
        raise ValueError(f"attention_mask has values other than 0 and 1, which cannot be honoured. {way_out}")
    if (hidden[:, :-1] & ~hidden[:, 1:]).any():
        raise ValueError(
            f"attention_mask hides tokens in front of others in a row (padding on the left or inside). {way_out}"
        )
    return hidden if hidden.any() else None


def _holds_length(value: Any, length: int) -> bool:
    """Whether a tensor somewhere inside has a dim of that size."""
    if isinstance(value, Tensor):
        return length in value.shape
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(_holds_length(member, length) for member in members)


def _settled_dim(key: str, shape: tuple[int, ...], length: int, dim: int | None) -> int | None:
    if dim is None:
        return None
    if not -len(shape) <= dim < len(shape) or shape[dim] != length:
        raise ValueError(
            f"batch entry {key!r} of shape {shape} is cut on dim {dim}, which should have {length} places, one for "
            f"each token. Correct the entry, or the strategy option sequence_dims: {{{key}: ...}}."
        )
    return dim % len(shape)
