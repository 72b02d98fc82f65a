"""A checkpoint takes the place of a file or of another checkpoint, and of nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_longctx.models.atomic import holds_working_directory
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.checkpoints.save_options import why_kept
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees
from tests.strategy.modules import LENGTH, loader
from tests.strategy.runs import QUIET
from tests.strategy.test_checkpoints import WithState

Pools = Callable[[int], GlooPool]


def test_what_may_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("full", "empty", "saved", "run/here"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("full/notes.txt", "saved/meta.pt", "file.ckpt"):
        (tmp_path / name).write_text("")
    for name, target in {"to_full": "full", "to_saved": "saved", "to_nothing": "nothing", "loop": "loop"}.items():
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    free = ("nothing", "file.ckpt", "empty", "saved", "to_saved", "to_nothing", "loop", "run/here")
    assert [name for name in free if why_kept(tmp_path / name) is not None] == []
    kept = {"full": "without meta.pt", "to_full": "without meta.pt", "run": "without meta.pt", "fifo": "no regular"}
    assert [name for name, why in kept.items() if why not in str(why_kept(tmp_path / name))] == []
    monkeypatch.chdir(tmp_path / "run" / "here")
    assert all("working directory" in str(why_kept(Path(path))) for path in (".", "..", tmp_path / "run", "/"))
    monkeypatch.chdir(tmp_path / "saved")
    assert "working directory" in str(why_kept(tmp_path / "to_saved"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert not holds_working_directory(tmp_path)


def saves(folder: Path, distributed: bool) -> list[str]:
    """What saving to some places says; a place that is free says nothing."""
    strategy = LongContextStrategy(Degrees(context=2), sharding="fsdp", save_distributed_checkpoint=distributed)
    trainer = Trainer(strategy=strategy, devices=2, max_steps=1, **QUIET)  # type: ignore[arg-type]
    torch.manual_seed(7)
    trainer.fit(WithState(), loader(2, length=LENGTH))
    told = []
    for name in ("results", "new.ckpt", "new.ckpt", "old.ckpt"):
        dist.barrier()
        try:
            trainer.save_checkpoint(folder / name)
            told.append("")
        except ValueError as problem:
            told.append(str(problem))
    return told


@pytest.mark.parametrize("distributed", [True, False])
def test_a_folder_that_is_no_checkpoint_stays(gloo: Pools, tmp_path: Path, distributed: bool) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "notes.txt").write_text("years of work")
    (tmp_path / "old.ckpt").mkdir()
    (tmp_path / "old.ckpt" / "meta.pt").write_text("of another run")
    one, other = gloo(2).run(saves, tmp_path, distributed)
    assert one == other and one[1:] == ["", "", ""], one
    assert f"save_checkpoint('{tmp_path}/results'): what is there is no checkpoint, but a directory" in one[0]
    assert f"such as {tmp_path}/results/last.ckpt." in one[0]
    assert (tmp_path / "results" / "notes.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.ckpt", "old.ckpt", "results"]
    assert all((tmp_path / name).is_dir() == distributed for name in ("new.ckpt", "old.ckpt"))
