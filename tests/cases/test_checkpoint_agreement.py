"""Which checkpoint is the best, and what it is called: one decision of all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees
from tests.cases.tiny import SGD, TINY, make_trainer, named_weights, samples

DEGREES = Degrees(data=2, context=2)
SECONDS = 120.0
OPTIONS: dict[str, Any] = dict(enable_checkpointing=True, use_distributed_sampler=True)


def fit(folder: Path, ckpt_path: Any = None, epochs: int = 3) -> tuple[Trainer, ModelCheckpoint, CausalLM]:
    """Ranks hold different tokens, so that their own losses differ; those of the epochs nearly tie."""
    torch.manual_seed(dist.get_rank())
    module = CausalLM(TINY, optimizer=lambda parameters: SGD(parameters, lr=1e-7))
    keep = ModelCheckpoint(folder, filename="{epoch}-{val_loss:.8f}", monitor="val_loss", save_top_k=1, save_last=True)
    trainer = make_trainer(DEGREES, max_epochs=epochs, callbacks=[keep], **OPTIONS)
    training, validation = DataLoader(samples(4), batch_size=1), DataLoader(samples(4, seed=1), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(module, training, validation, ckpt_path=ckpt_path)
    return trainer, keep, module


def save_the_best(folder: Path) -> tuple[Any, ...]:
    """What every rank takes for the best, and whether it can be loaded as soon as fit returns."""
    trainer, keep, module = fit(folder)
    loader = DataLoader(samples(4, seed=1))  # type: ignore[arg-type]
    (scored,) = trainer.validate(module, loader, ckpt_path="best", verbose=False)
    own = float(named_weights(module)["decoder.norm.weight"].sum())
    assert keep.best_model_score is not None
    return keep.best_model_path, float(keep.best_model_score), float(scored["val_loss"]), own


def test_all_ranks_keep_the_same_best(gloo: Any, tmp_path: Path) -> None:
    """B52: three epochs whose losses nearly tie."""
    results = gloo(4).run(save_the_best, tmp_path, timeout=SECONDS)
    assert results == results[:1] * 4
    path, best, score, _ = results[0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([Path(path).name, "last.ckpt"])
    assert score == pytest.approx(best, abs=1e-6) and f"val_loss={best:.8f}" in path


def go_on_from_last(folder: Path) -> tuple[int, Any]:
    fit(folder, epochs=1)
    if dist.get_rank() == 0:  # two that are equally old: which is the last?
        for name in ("last-v1.ckpt", "last-v2.ckpt"):
            os.system(f"cp -r {folder}/last.ckpt {folder}/{name}")
        for entry in folder.glob("last*"):
            os.utime(entry, (1, 1))
    dist.barrier()
    trainer, _, _ = fit(folder, ckpt_path="last", epochs=2)
    return trainer.global_step, trainer.current_epoch


def test_the_last_is_the_same_for_all(gloo: Any, tmp_path: Path) -> None:
    """B52: each rank chooses by the files' times, of which several may be equal; rank 0's choice is taken."""
    assert gloo(4).run(go_on_from_last, tmp_path, timeout=SECONDS) == [(4, 2)] * 4


class Odd(Callback):
    """Has a state that is no plain value."""

    def state_dict(self) -> dict[str, Any]:
        return {"odd": Path("somewhere")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["odd"]


class Notes(CausalLM):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.noted = checkpoint["global_step"]


def load_objects(path: Path, weights_only: bool | None) -> str:
    callback = Odd()
    module: LightningModule = Notes(TINY, optimizer=SGD)
    trainer = make_trainer(Degrees(context=2), callbacks=[callback], max_steps=1)
    loader = DataLoader(samples(2))  # type: ignore[arg-type]
    trainer.fit(module, loader)
    trainer.save_checkpoint(path)
    trainer = make_trainer(Degrees(context=2), callbacks=[callback], max_steps=2)
    try:
        trainer.fit(module, loader, ckpt_path=path, weights_only=weights_only)
    except ValueError as problem:
        return str(problem)
    return f"{callback.state} {module.noted} {trainer.global_step}"


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_weights_only_is_honoured(gloo: Any, tmp_path: Path, weights_only: bool | None) -> None:
    """Of a checkpoint with objects in it, which run code when they are read."""
    for said in gloo(2).run(load_objects, tmp_path / "some.ckpt", weights_only):
        assert said == "somewhere 1 2" if weights_only is False else "weights_only" in said
