"""What a checkpoint says of parameters and optimizers, and how it reaches those of other degrees.

A sharded checkpoint is a directory, as Lightning writes it: ``state_dict``, ``optimizer_0``, ... in the form of
``torch.distributed.checkpoint``, and ``meta.pt`` for the rest. One file is what Lightning writes of any module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_longctx._upstream import METADATA_FILENAME, is_sharded_checkpoint
from lightning_longctx.strategy.checkpoints.readable import readable

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of a parameter's name that compiling or checkpointing adds; checkpoints do not have them."""


def flat_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State of an optimizer by parameter name, one level deep: nested, it does not move to every other degrees."""
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(module, optimizer, options=options)


def whole_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State of an optimizer as it would be in one process, on rank 0; empty on the others. A collective.

    Parameters are numbered in the optimizer's own order, as ``Optimizer.state_dict`` does.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=options)  # type: ignore[assignment]
    return numbered(state["state"], state["param_groups"]) if state else {}


def numbered(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``Optimizer.state_dict()`` of one whose parameters are named."""
    names = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: entries for name, entries in state.items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def parameter_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of an optimizer's parameters by group, in its order."""
    names = {id(parameter): stripped(name) for name, parameter in module.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def stripped(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def read_rest(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read what is not sharded of a checkpoint; of one file, all of it, without taking memory for its tensors.

    Raises:
        ValueError: There is no checkpoint, or it cannot be read.
    """
    whole = path.is_file()
    if not whole and not is_sharded_checkpoint(path):
        what = f"a directory without {METADATA_FILENAME}" if path.is_dir() else "not there"
        raise ValueError(f"ckpt_path={path} is no checkpoint: it is {what}. Give the directory or file that was saved.")
    file = path if whole else path / METADATA_FILENAME
    with readable(file, _OBJECTS):
        rest = torch.load(file, map_location="cpu", mmap=whole, weights_only=weights_only)
    if not isinstance(rest, dict) or (whole and "state_dict" not in rest):
        what = "no state_dict" if isinstance(rest, dict) else f"a {type(rest).__name__}"
        raise ValueError(f"ckpt_path={path} is no checkpoint: {file} holds {what}. Give what a Trainer saved.")
    return rest


def load_sharded(path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool) -> None:
    """Read tensors of any degrees into a distributed module and its optimizers. A collective.

    Args:
        path: Directory of a sharded checkpoint.
        module: Distributed module.
        optimizers: In the order in which they were saved.
        strict: Whether the checkpoint must have every parameter.

    Raises:
        ValueError: A file of it is missing or not whole, it is of another module, or lacks optimizers.
    """
    with readable(path):
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    parameters = get_model_state_dict(module)
    _check_fits(path, stored, {f"state_dict.{name}": value for name, value in parameters.items()}, strict)
    with readable(path):
        dcp.load({"state_dict": parameters}, checkpoint_id=path, planner=planner)
    set_model_state_dict(module, parameters, options=StateDictOptions(strict=strict))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for index, optimizer in enumerate(optimizers):
        state = get_optimizer_state_dict(module, optimizer, options=options)
        name = f"optimizer_{index}"
        planner = _planner_for(path, stored, name, state)
        with readable(path):
            dcp.load({name: state}, checkpoint_id=path, planner=planner)
        set_optimizer_state_dict(module, optimizer, state, options=options)


def _check_fits(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], complete: bool) -> None:
    """Check what is stored against the tensors that are to be read, by name and shape.

    Raises:
        ValueError: A shape differs, or a name is missing where all must be there.
    """
    for name, value in wanted.items():
        if not isinstance(value, Tensor):
            continue
        entry = stored.get(name)
        if entry is None and complete:
            raise ValueError(
                f"ckpt_path={path} has no {name}: it is of another module. Build the module as when it was saved, or "
                "let it set strict_loading = False."
            )
        if isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            raise ValueError(
                f"ckpt_path={path} has {name} of shape {list(entry.size)}, the module's is of {list(value.shape)}. "
                "Build the module as when it was saved."
            )


def _planner_for(path: Path, saved: Mapping[str, Any], name: str, state: dict[str, Any]) -> DefaultLoadPlanner:
    """Lets those parameters stay without state that had none when it was saved, as one that never had a gradient.

    Raises:
        ValueError: There is no state at all, or only a part of what the optimizer has.
    """
    if not any(key.startswith(f"{name}.") for key in saved):
        raise ValueError(_NO_OPTIMIZER.format(path=path))
    wanted = {key: f"{name}.{key}" for key in state if key.startswith("state.")}
    known = {key.rpartition(".")[0] for key, full in wanted.items() if full in saved}
    missing = [key for key, full in wanted.items() if full not in saved and key.rpartition(".")[0] in known]
    # Part of a parameter's state is not none of it.
    partial = bool(known) and not missing
    # Containers are stored by what is in them.
    plain = (key for key, value in state.items() if not isinstance(value, Mapping | list | tuple))
    if not partial and (missing := [key for key in plain if f"{name}.{key}" not in saved]):
        raise ValueError(_OTHER_OPTIMIZER.format(path=path, entry=f"{name}.{missing[0]}"))
    return DefaultLoadPlanner(allow_partial_load=partial)


def load_whole(
    path: Path, checkpoint: Mapping[str, Any], module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool
) -> None:
    """Give every rank its part of a checkpoint that is one file. Nothing is sent: each rank has read the file.

    Args:
        path: Of the file, for messages.
        checkpoint: What is in it.
        module: Distributed module.
        optimizers: In the order in which they were saved.
        strict: Whether the checkpoint must have every parameter, and no other.

    Raises:
        ValueError: It has no optimizers, or they hold other parameters.
    """
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(module, dict(checkpoint["state_dict"]), options=options)
    states = checkpoint.get("optimizer_states", [])
    if len(states) < len(optimizers):
        raise ValueError(_NO_OPTIMIZER.format(path=path))
    for optimizer, state in zip(optimizers, states, strict=False):
        named = _named(state, parameter_names(module, optimizer), path)
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_optimizer_state_dict(module, optimizer, named, options=options)


def _named(state: Mapping[str, Any], names: list[list[str]], path: Path) -> dict[str, Any]:
    """``Optimizer.state_dict()`` with names in the place of numbers."""
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != [len(group) for group in names]:
        raise ValueError(
            f"an optimizer in ckpt_path={path} has groups of {saved} parameters, the module's has "
            f"{[len(group) for group in names]}. Configure the optimizer as when it was saved."
        )
    by_number = dict(
        pair
        for group, own in zip(state["param_groups"], names, strict=True)
        for pair in zip(group["params"], own, strict=True)
    )
    return {
        "state": {by_number[number]: entries for number, entries in state["state"].items()},
        "param_groups": [{**group, "params": own} for group, own in zip(state["param_groups"], names, strict=True)],
    }


_OBJECTS = (
    "It holds objects that a run of yours saved: fit(weights_only=False) reads them too. That may run code of the "
    "checkpoint: only for one you trust."
)
_OTHER_OPTIMIZER = "ckpt_path={path} has no {entry}. Configure the optimizer as when it was saved."
_NO_OPTIMIZER = (
    "ckpt_path={path} has no state of the optimizer: it holds weights only (save_weights_only=True). Training cannot "
    "go on from there; to begin anew with these weights, load them in the module, or validate with them."
)
