"""Writes a small GGUF file of the llama architecture, tokenizer included, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from lightning_longctx.models import Decoder, DecoderConfig
from lightning_longctx.models.pretrained.gguf import tensor_names

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t o", "b e", "Ġ to", "Ġ be", "Ġ Ġ", "1 2")
"""The last one must never apply: digits are tokens of their own."""


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for every byte (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


TOKENS = (*SPECIAL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES))
CONFIG = DecoderConfig(
    vocab_size=len(TOKENS),
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_width=64,
    rope_base=1000.0,
    tie_embeddings=True,
    max_positions=512,
)


def random_state(config: DecoderConfig = CONFIG) -> dict[str, Tensor]:
    """Weights as ``Decoder`` has them, norms not 1."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        state = Decoder(config).state_dict()
        return {name: torch.rand_like(w) + 0.5 if w.ndim == 1 else 4 * w for name, w in state.items()}


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """``permute`` of llama.cpp's convert_hf_to_gguf.py: rows of a query or key projection as llama.cpp turns them."""
    head_width = weight.shape[0] // num_heads
    return weight.reshape(num_heads, 2, head_width // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: DecoderConfig = CONFIG,
    state: dict[str, Tensor] | None = None,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    without: str = "",
    architecture: str = "llama",
    pre: str = "smollm",
    **more: Any,
) -> Path:
    """Write a model; random weights if none are given.

    Args:
        path: File to write.
        config: Shape.
        state: Weights by our names.
        kind: How matrices are stored; norms are always float32.
        without: A tensor or key that is left out.
        architecture: ``general.architecture``.
        pre: ``tokenizer.ggml.pre``.
        **more: Further integer or text values below ``llama.`` (with ``_`` for ``.``), or tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in [*metadata(config), ("tokenizer.ggml.pre", pre)]:
        if key != without:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
    for key, value in more.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(
                f"llama.{key.replace('_', '.')}", value
            )
    state = random_state(config) if state is None else state
    for theirs, ours in tensor_names(config).items():
        weight = state[ours].float().numpy()
        if ".attn_q." in theirs or ".attn_k." in theirs:
            weight = interleaved(weight, config.num_heads if "attn_q" in theirs else config.kv_heads)
        stored = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else kind
        if theirs != without:
            writer.add_tensor(theirs, gguf.quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(config: DecoderConfig) -> list[tuple[str, Any]]:
    """What a converter writes down of a model and its tokenizer."""
    return [
        ("llama.block_count", config.num_layers),
        ("llama.context_length", config.max_positions),
        ("llama.embedding_length", config.width),
        ("llama.feed_forward_length", config.mlp_size),
        ("llama.attention.head_count", config.num_heads),
        ("llama.attention.head_count_kv", config.kv_heads),
        ("llama.rope.freq_base", config.rope_base),
        ("llama.attention.layer_norm_rms_epsilon", config.norm_eps),
        ("llama.vocab_size", config.vocab_size),
        ("llama.rope.dimension_count", config.head_size),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.tokens", list(TOKENS)),
        ("tokenizer.ggml.token_type", [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL))),
        ("tokenizer.ggml.merges", list(MERGES)),
        ("tokenizer.ggml.eos_token_id", 2),
    ]
