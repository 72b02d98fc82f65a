"""``lightning-longctx export``: a checkpoint of ``CausalLM`` becomes a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from lightning_longctx._upstream import METADATA_FILENAME
from lightning_longctx.cli.checkpoint_files import gathered, unpickled
from lightning_longctx.models import DecoderConfig, save_pretrained

MODULE = "decoder."
"""Where ``CausalLM`` keeps its decoder."""

SHARDED = "state_dict"
"""Where a sharded checkpoint keeps the module's tensors."""


def export(
    checkpoint: str,
    folder: str,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_position_embeddings: int | None = None,
    decoder: DecoderConfig | None = None,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder: config.json and model.safetensors.

    One process is enough, whatever the degrees that trained it; the model has to fit into memory. A decoder with
    qk_norm becomes a Qwen3 model, any other a Llama model; what their layouts cannot hold is refused. Tokenizers are
    files of their own: copy yours beside it.

    Args:
        checkpoint: What Lightning saved of a CausalLM: a .ckpt file or directory.
        folder: What to write; it must not exist yet, or be empty.
        dtype: Of the weights. null keeps what the checkpoint has.
        max_position_embeddings: Longest sequence that the model is made for. null takes it from the decoder:
            max_positions, or rope_scaling.
        decoder: Shape of the model, for checkpoints that do not say it (of versions that did not write it).

    Raises:
        ValueError: The checkpoint is none, or of another module, or its model does not fit the layout.
    """
    weights, stated = read_checkpoint(Path(checkpoint))
    if stated is None and decoder is None:
        raise ValueError(
            f"{checkpoint} does not say the shape of its model. Give it: --decoder FILE.yaml with the options of "
            "model.init_args.decoder."
        )
    if stated is not None and decoder not in (None, stated):
        raise ValueError(f"decoder differs from what {checkpoint} says of itself. Leave decoder out.")
    save_pretrained(
        stated or decoder or DecoderConfig(),
        weights,
        folder,
        dtype=None if dtype is None else getattr(torch, dtype),
        max_position_embeddings=max_position_embeddings,
    )


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], DecoderConfig | None]:
    """Weights of the decoder in a checkpoint, whole and on the CPU, and its shape if the checkpoint says it.

    Args:
        path: A file with everything, or the directory of a sharded checkpoint.

    Raises:
        ValueError: Nothing that can be read is there, or it holds no ``CausalLM``.
    """
    if path.is_file():
        rest = unpickled(path)
        tensors = rest.get("state_dict")
    elif (path / METADATA_FILENAME).is_file():
        rest = unpickled(path)
        named = gathered(path, lambda name: name.startswith(f"{SHARDED}.{MODULE}"))
        tensors = {name.removeprefix(f"{SHARDED}."): value for name, value in named.items()}
    else:
        raise ValueError(f"{path} is no checkpoint: neither a file nor a directory with {METADATA_FILENAME}.")
    named = tensors.items() if isinstance(tensors, Mapping) else ()
    weights = {name.removeprefix(MODULE): value for name, value in named if str(name).startswith(MODULE)}
    if not weights:
        raise ValueError(f"{path} holds no weights of a CausalLM, whose names begin with {MODULE}")
    if wrong := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{path}: {MODULE}{wrong[0]} is no tensor. Give a checkpoint that Lightning saved.")
    stated = rest.get("decoder_config")
    try:
        return weights, None if stated is None else DecoderConfig.from_dict(stated)
    except ValueError as problem:
        raise ValueError(f"decoder_config in {path}: {problem}") from problem


def main(argv: Sequence[str]) -> None:
    """``lightning-longctx export CHECKPOINT FOLDER [options]``.

    Raises:
        SystemExit: With code 2 if an option is wrong or the model cannot be exported, after one message on stderr.
    """
    parser = ArgumentParser(prog="lightning-longctx export", allow_abbrev=False)
    parser.add_function_arguments(export, as_positional=True, sub_configs=True)
    options = parser.parse_args(list(argv)).as_dict()
    decoder = options.pop("decoder")
    try:
        if decoder is not None:
            decoder.pop("__path__", None)  # jsonargparse's note of the file that it came from
            decoder = DecoderConfig.from_dict(decoder)
        export(**options, decoder=decoder)
    except (ValueError, OSError) as problem:
        parser.error(" ".join(str(problem).split()))
    print(options["folder"])
