"""An embedding that is also the head stays one parameter through sharding, steps, saving and loading."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, LongContextStrategy, ShardingOptions
from lightning_longctx.models import Decoder
from tests.cases.tiny import (
    LEARNING_RATE,
    LENGTH,
    QUIET,
    SGD,
    TINY,
    Gradients,
    assert_equal_numbers,
    named_weights,
    samples,
    token_losses,
)
from tests.strategy.modules import Plain

TIED = replace(TINY, tie_embeddings=True)
STEPS_BEFORE, STEPS = 2, 3


@dataclass(frozen=True)
class Case:
    """How parameters are kept. ``kind`` is our decoder, which has one name for them, the same built without values
    (``meta``), or a user's module with ``head.weight = embedding.weight``.
    """

    sharding: str
    num_ranks: int
    shard_ranks: int | None = None
    kind: str = "named twice"


class Tied(CausalLM):
    """Our decoder."""

    def __init__(self, meta: bool) -> None:
        super().__init__(TIED, optimizer=SGD)
        self.meta = meta

    def configure_model(self) -> None:
        with torch.device("meta" if self.meta else "cpu"):
            super().configure_model()


def fit(case: Case, steps: int, save: Path | None, resume: Path | None) -> tuple[dict[str, Tensor], Any, bool]:
    """Weights by both names, gradients of every step, and whether both are one parameter."""
    torch.manual_seed(0)
    options: Any = dict(sharding=case.sharding)
    if case.shard_ranks is not None:
        options["sharding_options"] = ShardingOptions(shard_ranks=case.shard_ranks)
    strategy = LongContextStrategy(Degrees(context=case.num_ranks), **options)
    gradients = Gradients()
    module = Plain(tied=True) if case.kind == "named twice" else Tied(case.kind == "meta")
    trainer = Trainer(strategy=strategy, devices=dist.get_world_size(), max_steps=steps, callbacks=[gradients], **QUIET)
    trainer.fit(module, DataLoader(samples(STEPS), batch_size=1), ckpt_path=resume)  # type: ignore[arg-type]
    if save is not None:
        trainer.save_checkpoint(save)
    one = not isinstance(module, Plain) or module.embedding.weight is module.head.weight
    return named_weights(module), gradients.steps, one


def by_hand(kind: str, steps: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """In one process and in float64: autograd adds both contributions."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"decoder": Decoder(TIED)}) if kind != "named twice" else Plain(tied=True)
    module = module.double()
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    positions = torch.arange(LENGTH)[None]
    run: Any = partial(module, position_ids=positions) if isinstance(module, Plain) else module["decoder"]
    gradients = []
    for sample in samples(steps):
        optimizer.zero_grad()
        token_losses(run, [sample]).mean().backward()
        gradients.append({name: weight.grad.clone() for name, weight in module.named_parameters()})  # type: ignore
        optimizer.step()
    return {name: weight.detach() for name, weight in module.named_parameters()}, gradients


CASES = [
    Case("fsdp", 2),
    Case("fsdp", 2, kind="decoder"),
    Case("hsdp", 4, 2),
    Case("hsdp", 4, 2, kind="meta"),
    Case("replicate", 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_embedding_and_head_are_one_throughout(gloo: Any, tmp_path: Path, case: Case) -> None:
    """B32: two steps, save, reload, one more step: what one process does in three."""
    path = tmp_path / "two.ckpt"
    before = gloo(case.num_ranks).run(fit, case, STEPS_BEFORE, path, None)
    after = gloo(case.num_ranks).run(fit, case, STEPS, None, path)
    for steps, done, results in ((STEPS_BEFORE, 0, before), (STEPS, STEPS_BEFORE, after)):
        weights, gradients = by_hand(case.kind, steps)
        for found_weights, found_gradients, one in results:
            assert one, "embedding and head are one parameter"
            assert_equal_numbers(found_weights, weights, 1e-6)
            assert len(found_gradients) == steps - done
            for found, expected in zip(found_gradients, gradients[done:], strict=True):
                assert_equal_numbers(found, expected, 1e-6)
