"""Every replica starts from the same weights, whatever the seeds, the degrees, and how parameters are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees
from lightning_longctx.models import Decoder
from tests.cases.tiny import SGD, TINY, data_rank, make_trainer, named_weights, samples


class BuiltEarly(CausalLM):
    """Makes its parameters in ``__init__``, before the processes know each other."""

    def __init__(self) -> None:
        super().__init__(TINY, optimizer=SGD)
        self.decoder = Decoder(TINY)
        self.register_buffer("drawn", torch.rand(3))


class BuiltOnMeta(CausalLM):
    """Makes parameters without values; the strategy fills them in."""

    def __init__(self) -> None:
        super().__init__(TINY, optimizer=SGD)

    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()


MODULES: dict[str, Any] = {"late": lambda: CausalLM(TINY, optimizer=SGD), "early": BuiltEarly, "meta": BuiltOnMeta}


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    module: str
    sharding: str = "replicate"
    seed_by_rank: bool = False


class First(Callback):
    """Whole weights, and buffers, before the first step."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.weights = named_weights(module) | {name: buffer.clone() for name, buffer in module.named_buffers()}


def start(run: Start, degrees: Degrees) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before the first step, and after two, as this rank sees them."""
    seed_everything(7 + (dist.get_rank() if run.seed_by_rank else 0))
    rank, num_ranks = data_rank(degrees)
    module, first = MODULES[run.module](), First()
    trainer = make_trainer(degrees, sharding=run.sharding, callbacks=[first])
    trainer.fit(module, DataLoader(samples(2 * num_ranks)[rank::num_ranks], batch_size=1))  # type: ignore[arg-type]
    return first.weights, named_weights(module)


def start_all(runs: list[Start], degrees: Degrees) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [start(run, degrees) for run in runs]


RUNS = [
    Start("late"),
    Start("late", "fsdp"),
    Start("late", seed_by_rank=True),
    Start("early"),
    Start("early", "fsdp", seed_by_rank=True),
    Start("early", seed_by_rank=True),
    Start("meta"),
    Start("meta", "fsdp", seed_by_rank=True),
    Start("late", "hsdp"),
    Start("meta", "hsdp", seed_by_rank=True),
]


@pytest.fixture(scope="module")
def alone(gloo: Any) -> list[dict[str, Tensor]]:
    """Initial weights in one process, for every run."""
    return [weights for weights, _ in gloo(1).run(start_all, RUNS, Degrees())[0]]


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]


def test_the_seed_decides(alone: list[dict[str, Tensor]]) -> None:
    """B31: the same for both ways to keep parameters; and numbers were really drawn, others for every matrix."""
    for run, weights in zip(RUNS, alone, strict=True):
        other = RUNS.index(Start(run.module))
        assert not same(weights, alone[other])
        matrices = [weight for weight in weights.values() if weight.ndim == 2]
        assert all(float(weight.std()) > 0 for weight in matrices)
        assert len({float(weight.flatten()[0]) for weight in matrices}) == len(matrices)


@pytest.mark.parametrize(
    ("num_ranks", "degrees"),
    [
        (2, Degrees(context=2)),
        (2, Degrees(data=2)),
        (4, Degrees(data=2, context=2)),
        (4, Degrees(context=4, inner_ring=2)),
        (4, Degrees(context=2, tensor=2)),
    ],
)
def test_ranks_and_worlds_start_alike(gloo: Any, alone: Any, num_ranks: int, degrees: Degrees) -> None:
    """B31: bit-equal on all ranks and in all worlds, also where ranks are seeded 7, 8, 9, ...; and after steps."""
    by_rank = gloo(num_ranks).run(start_all, RUNS, degrees)
    for index, run in enumerate(RUNS):
        for results in by_rank:
            before, after = results[index]
            assert not same(before, alone[index]), run
            assert not same(after, by_rank[0][index][1]), run
            assert same(before | after, before), "two steps change something"
