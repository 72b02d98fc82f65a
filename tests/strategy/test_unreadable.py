"""Checkpoints that are not whole, or of another module: one error on every rank, which names them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.checkpoints import restoring
from lightning_longctx.strategy.checkpoints.tensors import read_rest
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees
from tests.strategy.modules import LENGTH, loader
from tests.strategy.runs import QUIET
from tests.strategy.test_checkpoints import WithState

Pools = Callable[[int], GlooPool]


class Wider(WithState):
    """Another module: a parameter has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Parameter(torch.zeros(80, 16))


class Longer(WithState):
    """Another module: it has more."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(3, 3)


class OtherOptimizer(WithState):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), amsgrad=True)


MODULES: dict[str, Any] = {"wider": Wider, "longer": Longer, "amsgrad": OtherOptimizer}


def fit(kind: str, resume: Path | None = None, save: Path | None = None, distributed: bool = True) -> None:
    torch.manual_seed(7)
    strategy = LongContextStrategy(Degrees(context=2), sharding="fsdp", save_distributed_checkpoint=distributed)
    trainer = Trainer(strategy=strategy, devices=2, max_steps=2 if resume else 1, **QUIET)  # type: ignore[arg-type]
    trainer.fit(MODULES.get(kind, WithState)(), loader(2, length=LENGTH), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)


def cut(file: Path, size: int | None = None) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 if size is None else size])


class Anything:
    """Not a plain value."""


DAMAGES: dict[str, Callable[[Path], object]] = {
    "rest": lambda path: cut(path / "meta.pt", 3),
    "rest gone": lambda path: (path / "meta.pt").unlink(),
    "metadata": lambda path: (path / ".metadata").unlink(),
    "metadata cut": lambda path: cut(path / ".metadata"),
    "shard": lambda path: (path / "__1_0.distcp").unlink(),
    "shard cut": lambda path: cut(path / "__1_0.distcp"),
    "file cut": cut,
    "file empty": lambda path: cut(path, 0),
    "file of others": lambda path: torch.save({"weight": torch.ones(1)}, path),
    "list": lambda path: torch.save([1], path),
}
MESSAGES = {
    "rest": "meta.pt cannot be read (",
    "rest gone": "is no checkpoint: it is a directory without meta.pt",
    "metadata": "some.ckpt cannot be read (FileNotFoundError: ",
    "metadata cut": "some.ckpt cannot be read (",
    "shard": "__1_0.distcp",
    "shard cut": "some.ckpt cannot be read (",
    "file cut": "one.ckpt cannot be read (",
    "file empty": "one.ckpt cannot be read (",
    "file of others": "one.ckpt holds no state_dict. Give what a Trainer saved.",
    "list": "one.ckpt holds a list. Give what a Trainer saved.",
    "wider": "has state_dict.positions of shape [64, 16], the module's is of [80, 16]. Build the module as when",
    "longer": "has no state_dict.more.weight: it is of another module. Build the module as when it was saved",
    "amsgrad": "has no optimizer_0.state.positions.max_exp_avg_sq. Configure the optimizer as when it was saved.",
    "one rank": "is full of holes (on rank 1 alone)",
}


def refused(kind: str, folder: Path) -> str:
    """The error of going on from a damaged checkpoint, or from a whole one with another module."""
    name = "one.ckpt" if "file" in kind or kind == "list" else "some.ckpt"
    path, read = folder / kind / name, restoring.read_rest
    if dist.get_rank() == 0:
        path.parent.mkdir()
        copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
        copy(folder / name, path)
        DAMAGES.get(kind, bool)(path)
    if kind == "one rank" and dist.get_rank() == 1:
        restoring.read_rest = lambda *_: (_ for _ in ()).throw(ValueError("it is full of holes"))
    dist.barrier()
    try:
        fit(kind, path)
    except ValueError as problem:
        return str(problem)
    finally:
        restoring.read_rest = read
    return ""


def all_refused(folder: Path) -> dict[str, str]:
    fit("", save=folder / "some.ckpt")
    fit("", save=folder / "one.ckpt", distributed=False)
    return {kind: refused(kind, folder) for kind in MESSAGES}


def test_what_is_wrong_with_a_checkpoint_is_said_on_every_rank(gloo: Pools, tmp_path: Path) -> None:
    one, other = gloo(2).run(all_refused, tmp_path)
    assert {kind: message for kind, message in MESSAGES.items() if message not in one[kind]} == {}, one
    assert one == other
    assert all(str(tmp_path / kind) in one[kind] for kind in MESSAGES if kind != "one rank"), one


def test_objects_are_read_on_demand(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "mine": Anything()}, tmp_path / "one.ckpt")
    with pytest.raises(
        ValueError, match=r"Unsupported global: GLOBAL .*Anything.*fit\(weights_only=False\) reads them"
    ):
        read_rest(tmp_path / "one.ckpt", True)
    assert isinstance(read_rest(tmp_path / "one.ckpt", False)["mine"], Anything)
