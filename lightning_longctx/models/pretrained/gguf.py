"""GGUF files of the llama architecture, as llama.cpp writes them: read as our decoder.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantised tensors become float32, exactly as
the file defines their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_longctx.models.config import DecoderConfig

OUTSIDE = {"token_embd": "embedding", "output_norm": "norm", "output": "head"}
INSIDE = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.output",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
"""Their tensor and ours, once in the model and once in every block."""

SIZES = {
    "width": "embedding_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "mlp_width": "feed_forward_length",
}
"""Our option and their key, which a file must have."""

HEAD_WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
OPTIONAL = {
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "context_length",
    "rope.freq_base",
    "vocab_size",
    *HEAD_WIDTHS,
}
"""Further keys that are understood; any other one may change the numbers."""


@dataclass(frozen=True, eq=False)
class GGUF:
    """A GGUF file: what it says, and its tensors as they are stored.

    Args:
        path: Where it is.
        metadata: Values by key; strings, numbers, booleans and lists of them.
        tensors: Stored values of every tensor, by name, mapped from the file, and their ``GGMLQuantizationType``.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[NDArray[Any], Any]]


def load_gguf(path: str | Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Read a GGUF file of the llama architecture.

    Args:
        path: The file.

    Returns:
        The shape of the model, and its tensors on the CPU, float32, by the names of ``Decoder.state_dict()``.

    Raises:
        ValueError: The file cannot be read, lacks a tensor, has an unexpected one, or is of a model that ``Decoder``
            cannot be; the message names what. Also if the package gguf is missing.
    """
    file = read_gguf(path)
    config = gguf_config(file)
    names = tensor_names(config)
    if missing := sorted(names.keys() - file.tensors.keys()):
        raise ValueError(f"{file.path} has no tensor {missing[0]}, {len(missing)} missing in all: it is not whole.")
    if unknown := sorted(file.tensors.keys() - names.keys()):
        raise ValueError(
            f"{file.path}: tensor {unknown[0]} has no place in the decoder. If the model is a Llama all the same, use "
            "its Hugging Face folder."
        )
    state = {ours: _dequantised(file, theirs) for theirs, ours in names.items()}
    for layer in range(config.num_layers):
        prefix = f"blocks.{layer}.attention"
        for name in ("query", "key"):
            state[f"{prefix}.{name}.weight"] = half_split(state[f"{prefix}.{name}.weight"], config.head_size)
    return config, state


def gguf_config(file: GGUF) -> DecoderConfig:
    """The shape of the decoder in a file.

    Raises:
        ValueError: It is of another architecture, lacks a size, or has a key that the decoder does not have.
    """
    try:
        return _config(file)
    except ValueError as problem:
        raise ValueError(f"{file.path}: {problem}") from problem


def _config(file: GGUF) -> DecoderConfig:
    if (architecture := file.metadata.get("general.architecture")) != "llama":
        raise ValueError(f"general.architecture={architecture!r} cannot be read; 'llama' can.")
    found = {key.removeprefix("llama."): value for key, value in file.metadata.items() if key.startswith("llama.")}
    if missing := sorted(set(SIZES.values()) - found.keys()):
        raise ValueError(f"llama.{missing[0]} is missing.")
    if unknown := sorted(found.keys() - set(SIZES.values()) - OPTIONAL):
        raise ValueError(
            f"llama.{unknown[0]}={found[unknown[0]]!r} cannot be honoured. If the model is a Llama all the same, use "
            "its Hugging Face folder."
        )
    if "token_embd.weight" not in file.tensors:
        raise ValueError("tensor token_embd.weight is missing.")
    vocab_size = len(file.tensors["token_embd.weight"][0])
    config = DecoderConfig(
        vocab_size=vocab_size,
        **{ours: found[theirs] for ours, theirs in SIZES.items()},
        num_kv_heads=found.get("attention.head_count_kv"),
        head_width=found.get("attention.key_length"),
        rope_base=_shortest(found.get("rope.freq_base", 10000.0)),
        norm_eps=_shortest(found.get("attention.layer_norm_rms_epsilon", 1e-5)),
        tie_embeddings="output.weight" not in file.tensors,
        max_positions=found.get("context_length"),
    )
    _check_agreement(found, {"vocab_size": vocab_size} | dict.fromkeys(HEAD_WIDTHS, config.head_size))
    return config


def _check_agreement(found: Mapping[str, Any], expected: Mapping[str, int]) -> None:
    for key, value in expected.items():
        if found.get(key, value) != value:
            raise ValueError(f"llama.{key}={found[key]} cannot be honoured: elsewhere the file says {value}.")


def tensor_names(config: DecoderConfig) -> dict[str, str]:
    """Our name of every tensor of a file, by theirs."""
    outside = {theirs: ours for theirs, ours in OUTSIDE.items() if theirs != "output" or not config.tie_embeddings}
    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in outside.items()}
    for layer in range(config.num_layers):
        names |= {f"blk.{layer}.{theirs}.weight": f"blocks.{layer}.{ours}.weight" for theirs, ours in INSIDE.items()}
    return names


def half_split(weight: Tensor, head_width: int) -> Tensor:
    """Rows of a query or key projection [H * D, width] in the order of our rotary positions.

    llama.cpp turns neighbours, (0, 1), (2, 3), ..., where we turn ``i`` and ``i + D / 2``.
    """
    return weight.unflatten(0, (-1, head_width // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def read_gguf(path: str | Path) -> GGUF:
    """What is in a file. Reading takes some seconds, most of them for the vocabulary; the last file is remembered.

    Raises:
        ValueError: It is no GGUF file, is cut short, or the package gguf is missing.
    """
    path = Path(path).absolute()
    if not path.is_file():
        raise ValueError(f"{path} is no file. Give a .gguf file.")
    now = path.stat()
    return _read(path, now.st_size, now.st_mtime_ns)


@lru_cache(maxsize=1)
def _read(path: Path, size: int, mtime_ns: int) -> GGUF:
    gguf = _gguf()
    try:
        reader = gguf.GGUFReader(path)
        # Not the reader itself: it keeps two arrays for every string of the vocabulary.
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as problem:  # what the bytes of a broken file lead the reader to
        raise ValueError(f"{path} cannot be read as a GGUF file of {size:,} bytes: {problem}") from problem
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    return GGUF(path, metadata, tensors)


def _dequantised(file: GGUF, name: str) -> Tensor:
    stored, kind = file.tensors[name]
    try:
        values = _gguf().quants.dequantize(stored, kind)
    except RuntimeError as problem:
        raise ValueError(f"{file.path}: tensor {name} is stored as {kind.name}, which gguf cannot read.") from problem
    return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: what is mapped cannot be written


def _shortest(value: float) -> float:
    """The decimal that was rounded to a float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as problem:
        raise ValueError("reading GGUF files needs: pip install gguf") from problem
    return gguf
