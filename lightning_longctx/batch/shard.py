"""Cut a full batch into what one rank holds: pad, shift labels, number positions, count, and cut everything once."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.batch.entries import attention_padding, sequence_dim, tokens_shape
from lightning_longctx.batch.labels import IGNORE, count_valid, shift_labels
from lightning_longctx.sequence.layout import LAYOUTS, LayoutName, padded_length
from lightning_longctx.sequence.record import SequenceRecord

LABELS = ("labels", "shift_labels", "attention_mask")
TOKENS = ("input_ids", "inputs_embeds")
SETTLED = {"sequence_dims": (*TOKENS, *LABELS), "pad_values": (*LABELS, "position_ids")}
"""Entries that an option may not change: how they are cut and padded follows from what they mean."""


@dataclass(frozen=True)
class Sharding:
    """How every batch of a loader is cut. Plain values, so that it travels to spawned workers.

    Args:
        layout: Which layout cuts sequences.
        num_ranks: Context ranks.
        inner_ring: Context ranks in one inner ring.
        rank: This process's position on the context axes.
        multiple: Sequences are padded at the tail to a multiple of this (see ``sequence.layout.padding_multiple``).
        ring: Name of the transport that joins the ranks.
        backend: Which attention backend computes a tile.
        sequence_dims: (entry, dim) for entries whose sequence dim cannot be told from the shape; a negative dim counts
            from the end, ``None`` leaves the entry whole.
        pad_values: (entry, value) for entries that are not padded with 0.

    Raises:
        ValueError: An unknown layout, a rank outside ``num_ranks``, a multiple below 1, or an option for an entry
            that is not free to be set.
    """

    layout: LayoutName = "contiguous"
    num_ranks: int = 1
    inner_ring: int = 1
    rank: int = 0
    multiple: int = 1
    ring: str = ""
    backend: str = "auto"
    sequence_dims: tuple[tuple[str, int | None], ...] = ()
    pad_values: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r} is unknown; choose one of {LAYOUTS}.")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank={self.rank} is not one of the {self.num_ranks} context ranks.")
        if self.multiple < 1:
            raise ValueError(f"multiple={self.multiple} must be a positive integer.")
        for option, settled in SETTLED.items():
            if taken := [key for key, _ in getattr(self, option) if key in settled]:
                raise ValueError(f"{option} cannot be set for {taken}: it follows from what they mean. Leave them out.")

    def record(self, length: int, num_valid_tokens: int, checksum: int = 0) -> SequenceRecord:
        """The record of a batch whose sequences have ``length`` tokens, padding included."""
        return SequenceRecord(
            length=length,
            layout=self.layout,
            num_ranks=self.num_ranks,
            inner_ring=self.inner_ring,
            rank=self.rank,
            num_valid_tokens=num_valid_tokens,
            checksum=checksum,
            ring=self.ring,
            backend=self.backend,
        )


def shard_batch(batch: Any, sharding: Sharding) -> Any:
    """Cut a full batch into the part this rank holds.

    Entries of the full batch, a mapping (B rows of S tokens):

    * ``input_ids`` [B, S] integers, or ``inputs_embeds`` [B, S, ...];
    * optional ``labels`` [B, S] (unshifted) or ``shift_labels`` [B, S] (shifted by you), -100 where nothing counts;
    * optional ``position_ids``, of which the last dim is the sequence: [S], [1, S], [B, S] or [3, B, S];
    * optional ``attention_mask`` [B, S] of ones and, at the tail of rows, zeros. It is removed: labels of hidden tokens
      become -100, and a causal mask hides what stands at the tail from every token that counts;
    * any other tensor [B, S, ...] is cut on dim 1; tensors without a dim of size S, and entries that are not tensors,
      stay whole.

    Returns:
        A dict (a ``UserDict`` such as a Hugging Face ``BatchEncoding`` keeps its type) with s tokens a row:
        ``input_ids`` [B, s], ``position_ids`` [B, s] int64, ``shift_labels`` [B, s] int64 if there were labels, the
        other entries, and ``sequence``: the ``SequenceRecord``, with the labels that count in the whole batch.

    Raises:
        ValueError: The batch is no mapping, is already cut, or has an entry that cannot be cut without asking.
    """
    entries = _checked_entries(batch)
    tokens = tokens_shape(entries)
    _hide_padding(entries, tokens)
    entries.setdefault("position_ids", torch.arange(tokens[1], device=_token_entry(entries).device))
    entries["position_ids"] = _rows_of_positions(entries["position_ids"], tokens)
    configured = dict(sharding.sequence_dims)
    if absent := sorted(configured.keys() - entries.keys()):
        raise ValueError(f"sequence_dims names {absent}, but the batch has the entries {sorted(entries)}. Correct it.")
    dims = {key: sequence_dim(key, value, tokens, configured) for key, value in entries.items()}

    length = padded_length(tokens[1], sharding.multiple)
    pads = dict(sharding.pad_values) | {"labels": IGNORE, "shift_labels": IGNORE}
    whole = {
        key: value if (dim := dims[key]) is None else _pad(key, value, dim, length - tokens[1], pads.get(key, 0))
        for key, value in entries.items()
    }
    if "labels" in whole:
        whole["shift_labels"] = shift_labels(whole.pop("labels"))
        dims["shift_labels"] = 1
    num_valid_tokens = count_valid(whole["shift_labels"]) if "shift_labels" in whole else -1
    record = sharding.record(length, num_valid_tokens, _checksum(whole))
    return _like(batch, _cut(whole, dims, record) | {"sequence": record})


def _checksum(entries: Mapping[str, Any]) -> int:
    """Of the tokens and their order, in 62 bits; 0 for embeddings."""
    if "input_ids" not in entries:
        return 0
    tokens = entries["input_ids"].flatten().to(torch.int64)
    places = torch.arange(1, tokens.numel() + 1, device=tokens.device)
    return int(((tokens + 1) * places * 0x9E3779B97F4A7C1).sum()) & (2**62 - 1)


def _checked_entries(batch: Any) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch of type {type(batch).__name__} cannot be cut along the sequence, because nothing says which "
            "part of it is what. Return a dict from collate_fn: {'input_ids': [B, S], 'labels': [B, S]}."
        )
    if "sequence" in batch:
        raise ValueError(
            "the batch already has a `sequence` entry: it was cut before. Remove the second ShardCollate, or rename "
            "your own `sequence` entry."
        )
    if batch.get("labels") is not None and batch.get("shift_labels") is not None:
        raise ValueError("the batch has both labels and shift_labels. Keep one: shift_labels if you shift yourself.")
    known = (*TOKENS, *LABELS, "position_ids")
    entries = {key: value for key, value in batch.items() if value is not None or key not in known}
    if wrong := [key for key in known if not isinstance(entries.get(key, torch.empty(0)), Tensor)]:
        raise ValueError(f"batch entries {wrong} must be tensors. Convert them in collate_fn.")
    return entries


def _token_entry(entries: Mapping[str, Any]) -> Tensor:
    return entries["input_ids"] if "input_ids" in entries else entries["inputs_embeds"]


def _hide_padding(entries: dict[str, Any], tokens: tuple[int, int]) -> None:
    """Take ``attention_mask`` out of the entries, and labels of what it hides out of the count."""
    hidden = attention_padding(entries.pop("attention_mask"), tokens) if "attention_mask" in entries else None
    for key in ("labels", "shift_labels"):
        if key not in entries:
            continue
        if tuple(entries[key].shape) != tokens:
            raise ValueError(
                f"{key} of shape {tuple(entries[key].shape)} must have one label for each token, {tokens}. "
                "Labels of whole sequences need another name."
            )
        if entries[key].is_floating_point():
            raise ValueError(
                f"{key} of dtype {entries[key].dtype} are no token ids. Give them another name if they are targets."
            )
        entries[key] = entries[key].to(torch.int64)
        if hidden is not None:
            entries[key] = entries[key].masked_fill(hidden, IGNORE)


def _rows_of_positions(position_ids: Tensor, tokens: tuple[int, int]) -> Tensor:
    position_ids = position_ids.to(torch.int64)
    shared = position_ids.ndim == 1 or tuple(position_ids.shape) == (1, tokens[1])
    return position_ids.expand(tokens) if shared and position_ids.shape[-1] == tokens[1] else position_ids


def _pad(key: str, tensor: Tensor, dim: int, count: int, value: int) -> Tensor:
    """``count`` more places at the tail of ``dim``; positions count on from their last, the rest repeats ``value``."""
    if count == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = count
    tail = tensor.new_full(shape, value)
    if key == "position_ids":
        steps = [1] * tensor.ndim
        steps[dim] = count
        tail = tensor.narrow(dim, -1, 1) + torch.arange(1, count + 1, device=tensor.device).view(steps)
    return torch.cat([tensor, tail], dim=dim)


def _cut(whole: dict[str, Any], dims: Mapping[str, int | None], record: SequenceRecord) -> dict[str, Any]:
    if record.num_ranks == 1:
        return {key: value.contiguous() if dims[key] is not None else value for key, value in whole.items()}
    pieces = (torch.arange(piece.start, piece.stop, piece.step) for piece in record.ranges)
    local = torch.cat([torch.zeros(0, dtype=torch.int64), *pieces])
    # index_select copies: a view would take the whole sequence along through a worker's shared memory.
    return {
        key: value if (dim := dims[key]) is None else value.index_select(dim, local.to(value.device))
        for key, value in whole.items()
    }


def _like(batch: Mapping[str, Any], entries: dict[str, Any]) -> Any:
    if not isinstance(batch, UserDict):
        return entries
    result = copy(batch)
    result.data = entries
    return result
