"""What one run saves, another with other degrees continues, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.testing import GlooPool, assert_all_close_relative
from lightning_longctx.topology import Degrees
from tests.strategy.modules import LENGTH, Plain, loader
from tests.strategy.runs import QUIET, weights

Pools = Callable[[int], GlooPool]


class WithState(Plain):
    """An optimizer with state and a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)  # a large eps does not amplify rounding
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(
    degrees: Degrees, sharding: str, epochs: int, save: Path | None, resume: Path | None, distributed: bool, tied: bool
) -> dict[str, Tensor]:
    from lightning.pytorch import Trainer

    torch.manual_seed(7)
    module = WithState(tied=tied)
    strategy = LongContextStrategy(degrees, sharding=sharding, save_distributed_checkpoint=distributed)  # type: ignore
    world = torch.distributed.get_world_size()
    trainer = Trainer(strategy=strategy, devices=world, max_epochs=epochs, use_distributed_sampler=False, **QUIET)  # type: ignore
    trainer.fit(module, loader(4, length=LENGTH), ckpt_path=resume)
    assert trainer.global_step == 4 * epochs
    if save is not None:
        trainer.save_checkpoint(save)
    return weights(module)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((1, Degrees(), "replicate"), (2, Degrees(context=2), "fsdp")),
        ((2, Degrees(context=2), "fsdp"), (1, Degrees(), "replicate")),
        ((2, Degrees(context=2), "fsdp"), (2, Degrees(context=2), "replicate")),
        ((2, Degrees(context=2), "replicate"), (2, Degrees(context=2), "fsdp")),
    ],
)
def test_resume_elsewhere(gloo: Pools, tmp_path: Path, first: Any, then: Any, distributed: bool) -> None:
    path = tmp_path / "half.ckpt"
    whole = gloo(1).run(train, Degrees(), "replicate", 2, None, None, True, False)[0]
    gloo(first[0]).run(train, first[1], first[2], 1, path, None, distributed, False)
    assert path.is_dir() == distributed
    assert [entry.name for entry in tmp_path.iterdir()] == ["half.ckpt"]
    resumed = gloo(then[0]).run(train, then[1], then[2], 2, path, path, distributed, False)[0]
    assert_all_close_relative(resumed, whole, "weights")


def test_tied_weights_stay_tied(gloo: Pools, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    whole = gloo(1).run(train, Degrees(), "replicate", 2, None, None, True, True)[0]
    gloo(2).run(train, Degrees(context=2), "fsdp", 1, path, None, True, True)
    resumed = gloo(2).run(train, Degrees(context=2), "fsdp", 2, None, path, True, True)[0]
    assert torch.equal(resumed["embedding.weight"], resumed["head.weight"])
    assert_all_close_relative(resumed, whole, "weights")


def validate(degrees: Degrees, path: Path) -> dict[str, Tensor]:
    from lightning.pytorch import Trainer

    torch.manual_seed(1)
    module = WithState()
    world = torch.distributed.get_world_size()
    trainer = Trainer(strategy=LongContextStrategy(degrees), devices=world, **QUIET)  # type: ignore[arg-type]
    trainer.validate(module, loader(2), ckpt_path=path, verbose=False)
    return weights(module)


@pytest.mark.parametrize("distributed", [True, False])
def test_evaluation_needs_no_optimizer(gloo: Pools, tmp_path: Path, distributed: bool) -> None:
    path = tmp_path / "some.ckpt"
    saved = gloo(2).run(train, Degrees(context=2), "fsdp", 1, path, None, distributed, False)[0]
    loaded = gloo(1).run(validate, Degrees(), path)[0]
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


class WithUnused(WithState):
    """Has a parameter that no step uses, and so no optimizer state."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.unused = torch.nn.Linear(3, 3)


def train_unused(save: Path | None, resume: Path | None) -> int:
    from lightning.pytorch import Trainer

    torch.manual_seed(7)
    trainer = Trainer(
        strategy=LongContextStrategy(Degrees(context=2)), devices=2, max_steps=8 if resume else 4, **QUIET
    )  # type: ignore
    trainer.fit(WithUnused(), loader(8, length=LENGTH), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer.global_step


def test_a_parameter_without_gradients_does_not_prevent_resuming(gloo: Pools, tmp_path: Path) -> None:
    assert gloo(2).run(train_unused, tmp_path / "half.ckpt", None) == [4, 4]
    assert gloo(2).run(train_unused, None, tmp_path / "half.ckpt") == [8, 8]


def save_twice(path: Path, file_first: bool) -> list[str]:
    from lightning.pytorch import Trainer

    torch.manual_seed(7)
    trainer = Trainer(strategy=LongContextStrategy(Degrees(context=2)), devices=2, max_steps=1, **QUIET)  # type: ignore
    trainer.fit(WithState(), loader(2, length=LENGTH))
    if file_first:
        path.write_text("a file")
    torch.distributed.barrier()
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(path)
    return sorted(entry.name for entry in path.parent.iterdir())


@pytest.mark.parametrize("file_first", [True, False])
def test_a_new_checkpoint_takes_the_place_of_what_was_there(gloo: Pools, tmp_path: Path, file_first: bool) -> None:
    assert gloo(2).run(save_twice, tmp_path / "last.ckpt", file_first)[0] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt" / "meta.pt").is_file()
