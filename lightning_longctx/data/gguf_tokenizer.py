"""The tokenizer inside a GGUF file, rebuilt with the ``tokenizers`` library.

Only byte-level BPE (``tokenizer.ggml.model`` is ``gpt2``), and only kinds of splitting that are known: a vocabulary
with the wrong splitting gives plausible ids that the model never saw. What each ``tokenizer.ggml.pre`` means is written
in llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEY = "tokenizer.ggml."
PLAIN, CONTROL, OF_USER = 1, 3, 4
"""Token types: from the vocabulary; special, never made from text by merging; whole words that were added."""

DIGITS_ALONE = {"gpt-2": False, "smollm": True}
"""Kinds that split like GPT-2, and whether every digit is a token of its own before that."""


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Raises:
        ValueError: It is of a kind that is not known, or a piece is missing.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    _check_kind(metadata)
    tokens, types = metadata[f"{KEY}tokens"], metadata[f"{KEY}token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{KEY}merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    splitting = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if DIGITS_ALONE[metadata[f"{KEY}pre"]]:
        splitting = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), splitting])
    tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind != PLAIN
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _check_kind(metadata: Mapping[str, Any]) -> None:
    if missing := [key for key in ("tokens", "token_type", "merges") if f"{KEY}{key}" not in metadata]:
        raise ValueError(f"{KEY}{missing[0]} is missing: the file holds no byte-level BPE tokenizer.")
    model, splitting = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}pre")
    if model != "gpt2" or splitting not in DIGITS_ALONE:
        raise ValueError(
            f"{KEY}model={model!r} with {KEY}pre={splitting!r} cannot be read; 'gpt2' with one of "
            f"{', '.join(DIGITS_ALONE)} can. Use the model's tokenizer.json."
        )
    if metadata.get(f"{KEY}add_space_prefix"):
        raise ValueError(f"{KEY}add_space_prefix=true cannot be read. Use the model's tokenizer.json.")
    if kinds := sorted(set(metadata[f"{KEY}token_type"]) - {PLAIN, CONTROL, OF_USER}):
        raise ValueError(f"{KEY}token_type={kinds[0]} cannot be read. Use the model's tokenizer.json.")
