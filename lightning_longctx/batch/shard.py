"""Cut a full batch into what one rank holds: pad, shift labels, number positions, count, and cut everything once."""

from __future__ import annotations

import hashlib
from collections import UserDict
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.batch.cut import cut_entries
from lightning_longctx.batch.entries import LABELS, TOKENS, attention_padding, sequence_dim, tokens_shape
from lightning_longctx.batch.labels import IGNORE, count_valid, shift_labels
from lightning_longctx.batch.positions import document_starts, find_documents, row_lengths, row_positions
from lightning_longctx.batch.sharding import Sharding
from lightning_longctx.sequence.layout import padded_length


def shard_batch(batch: Any, sharding: Sharding) -> Any:
    """Cut a full batch into the part this rank holds.

    Entries of the full batch, a mapping (B rows of S tokens):

    * ``input_ids`` [B, S] integers, or ``inputs_embeds`` [B, S, ...];
    * optional ``labels`` [B, S] (unshifted) or ``shift_labels`` [B, S] (shifted by you), -100 where nothing counts;
    * optional ``position_ids`` [S], [1, S] or [B, S], or with more dims in front, such as [3, B, S]. In the former a
      document starts wherever a position is not its predecessor plus one: packed documents do not see each other, and
      no token predicts the first of the next one. The latter declare no documents, and so do batches without any;
    * optional ``attention_mask`` [B, S] of ones and, at the tail of rows, zeros. It is removed: labels of hidden tokens
      become -100, a causal mask hides what stands at the tail from every token that counts, and positions count on
      there, as in all padding, which stays part of a row's last document;
    * any other tensor [B, S, ...] is cut on dim 1; tensors without a dim of size S, and entries that are not tensors,
      stay whole.

    Returns:
        A dict (a ``UserDict`` such as a Hugging Face ``BatchEncoding`` keeps its type) with s tokens a row: first
        ``input_ids`` [B, s], then ``position_ids`` [B, s] int64, ``shift_labels`` [B, s] int64 if there were labels,
        the other entries, and ``sequence``: the ``SequenceRecord``, with the labels that count in the whole batch.

    Raises:
        ValueError: The batch is no mapping, is already cut, or has an entry that cannot be cut without asking.
    """
    entries = _checked_entries(batch)
    tokens = tokens_shape(entries)
    hidden = _hide_padding(entries, tokens)
    entries.setdefault("position_ids", torch.arange(tokens[1], device=_token_entry(entries).device))
    entries["position_ids"] = row_positions(entries["position_ids"], tokens, hidden)
    lengths = row_lengths(entries["position_ids"], hidden)
    configured = dict(sharding.sequence_dims)
    if absent := sorted(configured.keys() - entries.keys()):
        raise ValueError(f"sequence_dims names {absent}, but the batch has the entries {sorted(entries)}. Correct it.")
    dims = {key: sequence_dim(key, value, tokens, configured) for key, value in entries.items()}

    length = padded_length(tokens[1], sharding.multiple)
    pads = dict(sharding.pad_values) | {"labels": IGNORE, "shift_labels": IGNORE}
    whole = {key: _pad(key, value, dims[key], length - tokens[1], pads.get(key, 0)) for key, value in entries.items()}
    positions = _declaring(whole["position_ids"], dims["position_ids"])
    documents, num_rows = ((), 1) if positions is None else find_documents(positions)
    if "labels" in whole:
        starts = None if positions is None else document_starts(positions)
        whole["shift_labels"] = shift_labels(whole.pop("labels"), starts)
        dims["shift_labels"] = 1
    num_valid_tokens = count_valid(whole["shift_labels"]) if "shift_labels" in whole else -1
    padded = length > tokens[1] or hidden is not None
    checksum = _checksum(whole, dims, length, num_rows, num_valid_tokens, *lengths, *documents)
    record = sharding.record(length, num_valid_tokens, checksum, documents, num_rows, padded, lengths)
    cut = cut_entries(whole, dims, record)
    # Lightning takes the first tensor's dim 0 for the batch size, by which it weighs means over an epoch.
    tokens_first = {key: cut[key] for key in TOKENS if key in cut}
    return _like(batch, tokens_first | cut | {"sequence": record})


def _checksum(entries: Mapping[str, Any], dims: Mapping[str, int | None], *numbers: int) -> int:
    """Of tokens, labels and other entries that are cut (none of embeddings) and of ``numbers``, in 62 bits."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8)
    cut = (key for key, value in entries.items() if dims[key] is not None and value.ndim <= 2)
    for key in sorted(cut):
        value = entries[key].to("cpu").contiguous()
        digest.update(f"{key}{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest()) & (2**62 - 1)


def _declaring(position_ids: Tensor, dim: int | None) -> Tensor | None:
    """The positions if they are of a form that declares documents."""
    if position_ids.ndim != 2:
        return None
    if dim != 1:
        raise ValueError(
            f"sequence_dims: {{position_ids: {dim}}} cannot be honoured: positions [B, S] go with their tokens. Leave "
            "it out."
        )
    return position_ids


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


def _hide_padding(entries: dict[str, Any], tokens: tuple[int, int]) -> Tensor | None:
    """Take ``attention_mask`` out of the entries, and labels of what it hides out of the count; return it."""
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
    return hidden


def _pad(key: str, tensor: Any, dim: int | None, count: int, value: int) -> Any:
    """``count`` more places at the tail of ``dim``; positions count on from their last, the rest repeats ``value``."""
    if dim is None or count == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = count
    tail = tensor.new_full(shape, value)
    if key == "position_ids":
        steps = [1] * tensor.ndim
        steps[dim] = count
        tail = tensor.narrow(dim, -1, 1) + torch.arange(1, count + 1, device=tensor.device).view(steps)
    return torch.cat([tensor, tail], dim=dim)


def _like(batch: Mapping[str, Any], entries: dict[str, Any]) -> Any:
    if not isinstance(batch, UserDict):
        return entries
    result = copy(batch)
    result.data = entries
    return result
