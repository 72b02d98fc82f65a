"""Hugging Face folders of Llama and Qwen3 models: ``config.json`` and safetensors, to our decoder and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.models.atomic import Draft, holds_working_directory
from lightning_longctx.models.config import DecoderConfig
from lightning_longctx.models.pretrained.config_json import decoder_config, hugging_face_config
from lightning_longctx.models.pretrained.names import from_hugging_face, to_hugging_face

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def load_pretrained(folder: str | Path, *, dtype: torch.dtype | None = None) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Read a Hugging Face folder of a Llama or Qwen3 model; nothing is downloaded.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors``, or several files with their
            ``model.safetensors.index.json``.
        dtype: Of the tensors; None keeps that of the files.

    Returns:
        The shape of the model, and its tensors on the CPU by the names of ``Decoder.state_dict()``:
        ``Decoder(config).load_state_dict(tensors)``.

    Raises:
        ValueError: The folder lacks a file or a tensor, has an unexpected one, or is of a model that ``Decoder`` cannot
            be; the message names what. Also if the package safetensors is missing.
    """
    folder = Path(folder)
    safetensors = _safetensors()
    config = decoder_config(read_json(folder / CONFIG), str(folder / CONFIG))
    tensors: dict[str, Tensor] = {}
    for file, names in _weight_files(folder).items():
        with _readable(file):
            found = safetensors.torch.load_file(file)
        _check_promised(folder, file, names, set(found))
        tensors |= found
    named = from_hugging_face(config, tensors, str(folder))
    return config, {name: tensor.to(dtype or tensor.dtype) for name, tensor in named.items()}


def check_weights(folder: Path) -> None:
    """Check that the weights of a folder can be read, by the heads of their files: quick, whatever their size.

    Raises:
        ValueError: A file is missing, cut short or no safetensors file, or another one than the index says. Also if
            the package safetensors is missing.
    """
    safetensors = _safetensors()
    for file, names in _weight_files(folder).items():
        with _readable(file), safetensors.safe_open(file, framework="pt") as found:
            stored = set(found.keys())
        _check_promised(folder, file, names, stored)


def save_pretrained(
    config: DecoderConfig,
    state_dict: Mapping[str, Tensor],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_position_embeddings: int | None = None,
) -> None:
    """Write a decoder as a Hugging Face folder that ``AutoModelForCausalLM.from_pretrained`` reads.

    A model with ``qk_norm`` becomes a ``Qwen3ForCausalLM``, any other a ``LlamaForCausalLM``. Call it on one rank. The
    folder appears only when it is whole.

    Args:
        config: Shape of the model.
        state_dict: ``Decoder.state_dict()``: whole tensors, on any device.
        folder: Must not exist yet, or be empty.
        dtype: Of the written tensors; None keeps theirs.
        max_position_embeddings: What ``config.json`` gives as the longest sequence; None is what ``config`` says.

    Raises:
        ValueError: The layout cannot hold the model, a tensor is missing or unexpected, the longest sequence is known
            from nowhere, or there is a folder already; nothing is written then. Also if the package safetensors is
            missing.
    """
    folder = Path(folder)
    safetensors = _safetensors()
    kept = dtype or _only_dtype(state_dict)
    written = hugging_face_config(config, kept, max_position_embeddings)
    tensors = to_hugging_face(config, state_dict)
    tensors = {name: tensor.detach().to("cpu", kept).contiguous() for name, tensor in tensors.items()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: choose another folder, or move it away.")
    if folder.exists() and holds_working_directory(folder):
        raise ValueError(f"{folder} is the working directory, and would be replaced: choose another folder.")
    draft = Draft(folder, folder=True)
    try:
        draft.begin()
    except OSError as problem:
        raise ValueError(
            f"{folder} cannot be made ({problem.strerror}). Choose a folder in a place that can be written to."
        ) from problem
    try:
        (draft.partial / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        safetensors.torch.save_file(tensors, draft.partial / WEIGHTS, metadata={"format": "pt"})
        draft.commit()
    except safetensors.SafetensorError as problem:
        draft.discard()
        raise ValueError(f"{folder / WEIGHTS} cannot be written: {problem}. Is the disk full?") from problem


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Files of a folder, and which tensors the index promises in each."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}. Other formats are not read: load the model with transformers "
            "and write it anew with its save_pretrained."
        )
    files: dict[Path, set[str] | None] = {}
    promised = read_json(folder / INDEX).get("weight_map")
    if not isinstance(promised, dict) or not all(isinstance(file, str) for file in promised.values()):
        raise ValueError(
            f"{folder / INDEX} has no weight_map from tensors to files: it is not whole. Copy or download it anew."
        )
    for name, file in sorted(promised.items()):
        names = files.setdefault(folder / file, set())
        if names is not None:
            names.add(name)
    if absent := [file for file in files if not file.is_file()]:
        raise ValueError(f"{absent[0]} is missing, but {INDEX} names it.")
    return files


def _only_dtype(state_dict: Mapping[str, Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in state_dict.values()}
    if len(dtypes) != 1:
        raise ValueError(f"tensors have the dtypes {sorted(map(str, dtypes))}, but a folder has one. Set dtype.")
    return dtypes.pop()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with an object in it.

    Raises:
        ValueError: It is missing, cut short or no JSON, or holds something else; the message names it.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: give a folder that a Hugging Face model was saved to.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is no whole JSON file ({problem}). Copy or download it anew.") from problem
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, but must hold an object. Copy or download it anew.")
    return found


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Say which file it is that safetensors cannot read."""
    try:
        yield
    except _safetensors().SafetensorError as problem:
        raise ValueError(
            f"{file} is no whole safetensors file ({file.stat().st_size:,} bytes; {problem}). Copy or download it "
            "anew; of a Git repository, with git lfs pull."
        ) from problem


def _check_promised(folder: Path, file: Path, names: set[str] | None, found: set[str]) -> None:
    if names is not None and names != found:
        wrong = sorted(names ^ found)[0]
        raise ValueError(f"{folder / INDEX} and {file.name} disagree about {wrong}: the folder is not whole.")


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as problem:
        raise ValueError("reading and writing Hugging Face folders needs: pip install safetensors") from problem
    return safetensors
