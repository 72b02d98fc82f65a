"""Hugging Face models in files: a configuration read, a model built or loaded, and written as one folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_longctx.models.atomic import holds_working_directory, written

_CONFIG = "config.json"
_WRITTEN = re.compile(r"(config|generation_config|model\.safetensors\.index)\.json|model(-\d+-of-\d+)?\.safetensors")
"""The files that ``save_pretrained`` writes."""


def read_config(source: str | Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """A ``PreTrainedConfig``.

    Args:
        source: Name on the hub, folder, or the entries of a configuration, ``model_type`` among them.
        overrides: Entries to change; there must be such.

    Raises:
        ValueError: transformers is missing, or an entry is not known.
    """
    if find_spec("transformers") is None:
        raise ValueError("a Hugging Face model needs the package transformers: pip install 'transformers>=5'.")
    from transformers import AutoConfig

    if isinstance(source, Mapping):
        entries = dict(source)
        if "model_type" not in entries:
            raise ValueError(f"the configuration {sorted(entries)} of model has no model_type, such as llama.")
        kind = entries.pop("model_type")
        _check_known(entries, AutoConfig.for_model(kind), "model")
        config = AutoConfig.for_model(kind, **entries)
    else:
        config = AutoConfig.from_pretrained(source)
    _check_known(overrides, config, "overrides")
    return type(config).from_dict(config.to_dict() | dict(overrides)) if overrides else config


def _check_known(entries: Mapping[str, Any], config: Any, option: str) -> None:
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    if unknown := sorted(set(entries) - known):
        raise ValueError(
            f"{option} has {', '.join(unknown)}, which {type(config).__name__} does not know. Correct it; known are "
            f"{', '.join(sorted(known))}."
        )


def build_model(weights: str | None, config: Any, dtype: str) -> Any:
    """A causal language model, in training mode.

    Args:
        weights: Name on the hub or folder to load from; None draws random ones.
        config: Its configuration.
        dtype: Of the weights, or ``auto`` for that of the files.
    """
    from transformers import AutoModelForCausalLM

    chosen = dtype if dtype == "auto" else getattr(torch, dtype)
    if weights is None:
        made = AutoModelForCausalLM.from_config(config, **({} if dtype == "auto" else {"dtype": chosen}))
    else:
        made = AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=chosen)
    return made.train()


def checkpoint_layers(model: Any) -> None:
    """Recompute a model's layers in backward instead of keeping what they computed."""
    # The newer name; the older one warns that it will go.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def check_target(folder: Path, source: Any = None) -> None:
    """Check that a model may be written to ``folder``: nothing is there, an empty folder, or a model and nothing else.

    Args:
        folder: It would be replaced whole.
        source: What the model was read from, if from a folder.

    Raises:
        ValueError: It holds something else, which would be lost, or is the source.
    """
    if isinstance(source, str) and Path(source).is_dir() and Path(source).resolve() == folder.resolve():
        raise ValueError(f"{folder} is the folder that the model comes from and would be replaced. Name another one.")
    if not folder.exists():
        return
    if holds_working_directory(folder):
        raise ValueError(f"{folder} is the working directory, or around it, and would be replaced. Name another one.")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not folder.is_dir() or (names and _CONFIG not in names):
        raise ValueError(
            f"{folder} is there and holds no model ({_CONFIG}): it would be replaced. Name another folder."
        )
    if others := [name for name in names if not (_WRITTEN.fullmatch(name) and (folder / name).is_file())]:
        raise ValueError(
            f"{folder} holds more than a model ({', '.join(others)}), and would be replaced whole. Name another "
            "folder, or move these away."
        )


def write_model(model: Any, folder: Path) -> None:
    """Write a model whose parameters may be distributed. A collective, if there is a process group.

    Args:
        model: A ``PreTrainedModel``.
        folder: Appears only when it is whole.

    Raises:
        ValueError: See ``check_target``.
    """
    check_target(folder := folder.absolute())
    spread = dist.is_initialized()
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    owners: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights:  # gathering gives each name of a tied parameter a tensor of its own
            weights[name] = owners.setdefault(id(parameter), weights[name])
    if not spread or dist.get_rank() == 0:
        with written(folder, folder=True) as partial:
            model.save_pretrained(partial, state_dict=weights)
    if spread:
        dist.barrier()
