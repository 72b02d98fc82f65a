"""Tied weights stay one: after sharding, saving and loading, with the gradients of both of their uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_longctx import Degrees
from tests.cases.tiny import Gradients, assert_equal_numbers, make_trainer, named_weights
from tests.strategy.modules import Plain, samples


def train(
    degrees: Degrees, sharding: str, steps: int, save: Path | None, resume: Path | None, **options: Any
) -> list[Any]:
    """Gradients of every step, the weights at the end, and whether embedding and head are one."""
    torch.manual_seed(0)
    module, gradients = Plain(tied=True), Gradients()
    trainer = make_trainer(degrees, sharding=sharding, max_steps=steps, callbacks=[gradients], **options)
    trainer.fit(module, DataLoader(samples(3)), ckpt_path=resume)  # type: ignore[arg-type]
    if save is not None:
        trainer.save_checkpoint(save)
    return [gradients.steps, named_weights(module), module.embedding.weight is module.head.weight]


@pytest.mark.parametrize("world", [(1, Degrees(), "fsdp"), (2, Degrees(context=2), "fsdp")], ids=["one", "two"])
def test_a_tied_head_goes_on_after_a_reload(gloo: Any, tmp_path: Path, world: Any) -> None:
    """B32: two steps, saved, loaded, one more; against three steps of one process."""
    num_ranks, *run = world
    steps, end, _ = gloo(1).run(train, Degrees(), "replicate", 3, None, None)[0]
    assert len(steps) == 3 and "head.weight" not in steps[0]  # the gradient of both uses together
    before, _, first_tied = gloo(num_ranks).run(train, *run, 2, tmp_path / "half.ckpt", None)[0]
    after, weights, then_tied = gloo(num_ranks).run(train, *run, 3, None, tmp_path / "half.ckpt")[0]
    assert first_tied and then_tied
    for gradients, expected in zip([*before, *after], steps, strict=True):
        assert_equal_numbers(gradients, expected, 1e-6)
    assert_equal_numbers(weights, end, 1e-6)
