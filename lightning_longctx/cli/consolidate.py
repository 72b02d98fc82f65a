"""``lightning-longctx consolidate``: the directory that many ranks wrote becomes one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser

from lightning_longctx._upstream import METADATA_FILENAME
from lightning_longctx.cli.checkpoint_files import gathered, unpickled
from lightning_longctx.models.atomic import written
from lightning_longctx.strategy.checkpoints.position import position_in
from lightning_longctx.strategy.checkpoints.tensors import numbered

WEIGHTS = "state_dict."


def consolidate(checkpoint: str, file: str, optimizers: bool = True, weights_only: bool = True) -> None:
    """Turn a checkpoint directory into one file, as Lightning writes it of a run on one device.

    fit --ckpt_path FILE goes on from it as from the directory, on any degrees, and so does plain Lightning; validate,
    LightningModule.load_from_checkpoint and torch.load read it. One process does it, whatever the degrees that trained
    it; weights and optimizers have to fit into memory.

    Args:
        checkpoint: Directory that LongContextStrategy wrote.
        file: What to write; it must not exist yet.
        optimizers: Whether to keep the optimizers' state, most of the bytes. Without it training cannot go on from
            the file.
        weights_only: Whether to read plain values only. false also reads objects that the run saved, such as
            hyper-parameters of its own classes; that may run code of the checkpoint: only for one you trust.

    Raises:
        ValueError: There is no such checkpoint, it cannot be read, or the file exists.
    """
    folder, target = Path(checkpoint), Path(file)
    if not (folder / METADATA_FILENAME).is_file():
        what = "one file already" if folder.is_file() else f"no directory with {METADATA_FILENAME}"
        raise ValueError(f"{folder} is {what}. Give the directory of a checkpoint, such as checkpoints/last.ckpt.")
    if target.exists():
        raise ValueError(f"{target} exists already: choose another name, or move it away.")
    whole = unpickled(folder, weights_only)
    groups = _optimizer_groups(whole, folder) if optimizers else []
    entries = gathered(folder, lambda name: optimizers or name.startswith(WEIGHTS))
    whole["state_dict"] = _under(entries, WEIGHTS)
    if optimizers:
        whole["optimizer_states"] = [
            optimizer_state(_under(entries, f"optimizer_{index}."), names) for index, names in enumerate(groups)
        ]
    with written(target, folder=False) as partial:
        torch.save(whole, partial)


def _optimizer_groups(rest: dict[str, Any], folder: Path) -> list[list[list[str]]]:
    if (saved := position_in(rest)) is None:
        raise ValueError(
            f"{folder} does not say in which order its optimizers have their parameters: LongContextStrategy did not "
            "write it, or an early version. Use --optimizers false for the weights alone, or save it anew: fit "
            f"--ckpt_path {folder} reads it."
        )
    return saved["optimizers"]


def optimizer_state(entries: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """``Optimizer.state_dict()`` from its entries by parameter name, ``state.NAME.KEY`` and ``param_groups.NAME.KEY``.

    Args:
        entries: Of one optimizer.
        groups: Names of its parameters.
    """
    state, options = ({}, {})
    for kind, found in (("state.", state), ("param_groups.", options)):
        for place, value in _under(entries, kind).items():
            name, _, key = place.rpartition(".")
            found.setdefault(name, {})[key] = value
    return numbered(state, [{**options[names[0]], "params": names} for names in groups if names])


def _under(entries: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}


def main(argv: Sequence[str]) -> None:
    """``lightning-longctx consolidate CHECKPOINT FILE [options]``.

    Raises:
        SystemExit: With code 2 if an option is wrong or the checkpoint cannot be read, after one message on stderr.
    """
    parser = ArgumentParser(prog="lightning-longctx consolidate", allow_abbrev=False)
    parser.add_function_arguments(consolidate, as_positional=True)
    options = parser.parse_args(list(argv)).as_dict()
    try:
        consolidate(**options)
    except (ValueError, OSError) as problem:
        parser.error(" ".join(str(problem).split()))
    print(options["file"])
