"""Sharded checkpoints (DCP): every rank writes its part, and any other degrees can read them.

A checkpoint is a directory, as Lightning writes it: ``state_dict``, ``optimizer_0``, ... in the form of
``torch.distributed.checkpoint``, and ``meta.pt`` for the rest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_longctx._upstream import METADATA_FILENAME


def flat_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State of an optimizer by parameter name, one level deep: nested, it does not move to every other degrees."""
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(module, optimizer, options=options)


def save_sharded(checkpoint: dict[str, Any], path: Path, is_first: bool, barrier: Callable[[], None]) -> None:
    """Write a checkpoint; ``path`` appears only when it is whole. A collective.

    Args:
        checkpoint: Lightning's; ``state_dict`` and ``optimizer_states`` are sharded.
        path: Directory to write, the same on all ranks; what is there is replaced.
        is_first: Whether this is rank 0.
        barrier: Waits for all ranks.
    """
    rest = dict(checkpoint)
    sharded = {"state_dict": rest.pop("state_dict")}
    sharded |= {f"optimizer_{index}": state for index, state in enumerate(rest.pop("optimizer_states", []))}
    partial = path.with_name(f".{path.name}.partial")
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    dcp.save(sharded, checkpoint_id=partial)
    if is_first:
        torch.save(rest, partial / METADATA_FILENAME)
        _swap(partial, path)
    barrier()


def _swap(new: Path, path: Path) -> None:
    """Put ``new`` in the place of what is at ``path``, which is renamed first: at any time one of them is whole."""
    old = path.with_name(f".{path.name}.replaced")
    _remove(old)
    if path.exists():
        path.rename(old)
    new.rename(path)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _planner_for(path: Path, name: str, state: dict[str, Any]) -> DefaultLoadPlanner:
    """Lets those parameters stay without state that had none when it was saved, as one that never had a gradient."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted = {key: f"{name}.{key}" for key in state if key.startswith("state.")}
    known = {key.rpartition(".")[0] for key, full in wanted.items() if full in saved}
    missing = [key for key, full in wanted.items() if full not in saved and key.rpartition(".")[0] in known]
    # Part of a parameter's state is not none of it: then the strict planner says what is missing.
    return DefaultLoadPlanner(allow_partial_load=bool(known) and not missing)


def load_sharded(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Read a checkpoint of any degrees into a distributed module and its optimizers. A collective.

    Args:
        path: Directory that ``save_sharded`` wrote.
        module: Distributed module.
        optimizers: In the order in which they were saved.
        strict: Whether the checkpoint must have every parameter.
        weights_only: As in ``torch.load``, for ``meta.pt``.

    Returns:
        What is not sharded.
    """
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    parameters = get_model_state_dict(module)
    dcp.load({"state_dict": parameters}, checkpoint_id=path, planner=planner)
    set_model_state_dict(module, parameters, options=StateDictOptions(strict=strict))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for index, optimizer in enumerate(optimizers):
        state = get_optimizer_state_dict(module, optimizer, options=options)
        name = f"optimizer_{index}"
        dcp.load({name: state}, checkpoint_id=path, planner=_planner_for(path, name, state))
        set_optimizer_state_dict(module, optimizer, state, options=options)
    return torch.load(path / METADATA_FILENAME, weights_only=weights_only)
