"""Our ``DecoderConfig`` as the ``config.json`` of a Llama or Qwen3 model, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_longctx.models.config import DecoderConfig
from lightning_longctx.models.pretrained.rope_parameters import longest_sequence, read_rope, written_rope
from lightning_longctx.models.rope_scaling import is_number

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
}
"""Our option and their key, where a file must have it."""

FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
"""Keys that change the numbers, and the only value that ``Decoder`` can be; all of them their default."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "qwen3": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128}
    | {"sliding_window": 4096, "max_window_layers": 28},
}
"""What transformers takes where a file lacks a key."""

WINDOWED, FULL = "sliding_attention", "full_attention"


def decoder_config(file: Mapping[str, Any], source: str) -> DecoderConfig:
    """The shape of a decoder from their ``config.json``.

    Args:
        file: The parsed file, of transformers 4 or 5.
        source: Its path, for messages.

    Raises:
        ValueError: It is no Llama or Qwen3 model, lacks a size, or has an option that ``Decoder`` does not have.
    """
    try:
        return _decoder_config(file)
    except ValueError as problem:
        raise ValueError(f"{source}: {problem}") from problem


def _decoder_config(file: Mapping[str, Any]) -> DecoderConfig:
    kind = file.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} cannot be read; {' and '.join(ARCHITECTURES)} can.")
    if missing := [key for key in SIZES.values() if file.get(key) is None]:
        raise ValueError(f"{missing[0]} is missing.")
    for key, value in FIXED.items():
        if (found := file.get(key, value)) != value:
            raise ValueError(f"{key}={found!r} cannot be honoured: the decoder has {key}={value!r} only.")
    read = DEFAULTS[kind] | dict(file)
    _check_values(read)
    base, scaling = read_rope(read)
    return DecoderConfig(
        **{ours: read[theirs] for ours, theirs in SIZES.items()},
        num_kv_heads=read.get("num_key_value_heads"),
        head_width=read.get("head_dim"),
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=read["rms_norm_eps"],
        qk_norm=kind == "qwen3",
        tie_embeddings=read.get("tie_word_embeddings", False),
        windows=_windows(read) if kind == "qwen3" else (None,),
        attention_dropout=read.get("attention_dropout") or 0.0,
        max_positions=read["max_position_embeddings"],
    )


def _check_values(file: Mapping[str, Any]) -> None:
    """Refuse what is no number, integer or boolean under the file's own name of it; null is for others to judge."""
    for key in (*SIZES.values(), "num_key_value_heads", "head_dim", "max_position_embeddings"):
        if (value := file.get(key)) is not None and not _is_count(value, 1):
            raise ValueError(f"{key}={value!r} must be a positive integer. Correct the file.")
    for key in ("rms_norm_eps", "attention_dropout"):
        if (value := file.get(key)) is not None and not is_number(value):
            raise ValueError(f"{key}={value!r} must be a finite number, without quotes. Correct the file.")
    for key in ("tie_word_embeddings", "use_sliding_window"):
        if not isinstance(value := file.get(key, False), bool):
            raise ValueError(f"{key}={value!r} must be true or false. Correct the file.")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _windows(file: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows of the layers in the shortest form that repeats."""
    count, first = file["num_hidden_layers"], file["max_window_layers"]
    if file.get("use_sliding_window") and not _is_count(first, 0):
        raise ValueError(f"max_window_layers={first!r} must be an integer of at least 0. Correct the file.")
    window = file["sliding_window"] if file.get("use_sliding_window") else None
    by_number = [FULL if window is None or layer < first else WINDOWED for layer in range(count)]
    kinds = file.get("layer_types") or by_number
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (FULL, WINDOWED) for kind in kinds):
        raise ValueError(f"layer_types={kinds} must be {count} entries of {FULL} or {WINDOWED}.")
    if WINDOWED in kinds and window is None:
        raise ValueError(f"layer_types has {WINDOWED}, but use_sliding_window or sliding_window is not set.")
    layers = tuple(window if kind == WINDOWED else None for kind in kinds)
    periods = (layers[:size] for size in range(1, count + 1))
    return next(period for period in periods if layers == (period * count)[:count])


def hugging_face_config(
    config: DecoderConfig, dtype: torch.dtype, max_position_embeddings: int | None = None
) -> dict[str, Any]:
    """Their ``config.json`` for our decoder.

    Args:
        config: Shape of the decoder. With ``qk_norm`` it is a Qwen3 model, without it a Llama model.
        dtype: Of its tensors.
        max_position_embeddings: Longest sequence; None is what ``config`` says.

    Raises:
        ValueError: The layout cannot hold the decoder, or the longest sequence is known from nowhere.
    """
    kind = "qwen3" if config.qk_norm else "llama"
    _check_layout(config, kind)
    asked = config.max_positions if max_position_embeddings is None else max_position_embeddings
    dtype_name = str(dtype).removeprefix("torch.")
    file = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "intermediate_size": config.mlp_size,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": config.attention_dropout,
        "max_position_embeddings": longest_sequence(config.rope_scaling, asked),
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype_name,  # before transformers 4.56
        "dtype": dtype_name,
        **written_rope(config.rope_base, config.rope_scaling),
    }
    return file | ({"mlp_bias": False} if kind == "llama" else _written_windows(config))


def _check_layout(config: DecoderConfig, kind: str) -> None:
    counts = {window for window in config.layer_windows if window is not None}
    refusals = {
        "sinks=true": config.sinks,
        f"softcap={config.softcap}": config.softcap is not None,
        f"windows={list(config.windows)} without qk_norm": kind == "llama" and bool(counts),
        f"windows={list(config.windows)}, more than one size,": len(counts) > 1,
        f"num_heads={config.num_heads}, which does not divide width={config.width},": (
            kind == "llama" and config.width % config.num_heads != 0
        ),
    }
    if refused := [option for option, is_refused in refusals.items() if is_refused]:
        raise ValueError(
            f"{refused[0]} has no place in the layout of {ARCHITECTURES[kind]}: such a model cannot be exported. Keep "
            "its checkpoint, or train one without it."
        )


def _written_windows(config: DecoderConfig) -> dict[str, Any]:
    windows = config.layer_windows
    window = next((each for each in windows if each is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": next((layer for layer, each in enumerate(windows) if each is not None), len(windows)),
        "layer_types": [FULL if each is None else WINDOWED for each in windows],
    }
