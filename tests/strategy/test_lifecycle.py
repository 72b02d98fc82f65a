"""Repeated use, evaluation, clipping, randomness and refusals inside a Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.testing import FLOAT32, GlooPool, RankError, assert_all_close_relative
from lightning_longctx.topology import Degrees
from tests.strategy.modules import Plain, samples
from tests.strategy.runs import QUIET, Run, build, data, fit, trainer, weights

Pools = Callable[[int], GlooPool]


def many_calls(run: Run) -> tuple[int, dict[str, Tensor]]:
    """fit, validate, fit again, predict, with a sanity check first."""
    module = build(run)
    made = trainer(run, torch.distributed.get_world_size(), num_sanity_val_steps=2)
    made.fit(module, data(run), data(run))
    mesh = made.strategy.mesh  # type: ignore[attr-defined]
    made.validate(module, data(run), verbose=False)
    made.fit_loop.max_epochs = 2
    made.fit(module, data(run), data(run))
    assert made.strategy.mesh is mesh  # type: ignore[attr-defined]
    other = trainer(run, torch.distributed.get_world_size())
    other.validate(module, data(run), verbose=False)
    return made.global_step, weights(module)


def twice(run: Run) -> dict[str, Tensor]:
    module = build(run)
    trainer(run, torch.distributed.get_world_size(), max_epochs=2).fit(module, data(run))
    return weights(module)


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_fit_validate_fit(gloo: Pools, sharding: str) -> None:
    run = Run(Degrees(context=2), sharding=sharding)
    expected = gloo(1).run(twice, Run())[0]
    results = gloo(2).run(many_calls, run)
    assert results[0][0] == 12
    assert_all_close_relative(results[0][1], expected, "weights")


class LeavesEarly(Plain):
    """Ends the first epoch in the middle of an accumulation window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None


def after_half_a_window(run: Run) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(7)
    module = LeavesEarly()
    trainer(run, 2, max_epochs=2).fit(module, data(run))
    return module.norms, weights(module)


def test_an_unfinished_window_leaves_no_gradient(gloo: Pools) -> None:
    run = Run(Degrees(context=2), accumulate=3)
    norms, expected = gloo(2).run(fit, run)[0]
    found_norms, found = gloo(2).run(after_half_a_window, run)[0]
    assert found_norms == pytest.approx(norms, rel=FLOAT32)
    assert_all_close_relative(found, expected, "weights")


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_clipping_sees_the_norm_of_one_process(gloo: Pools, sharding: str) -> None:
    clip = 0.05
    run = Run(Degrees(context=2), sharding=sharding, clip=clip)
    norms, expected = gloo(1).run(fit, replace(run, degrees=Degrees()))[0]
    assert max(norms) > 2 * clip
    found_norms, found = gloo(2).run(fit, run)[0]
    assert found_norms == pytest.approx(norms, rel=FLOAT32)
    assert_all_close_relative(found, expected, "weights")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_runs(gloo: Pools, precision: str) -> None:
    run = Run(Degrees(context=2), sharding="fsdp", precision=precision, accumulate=2)
    expected = gloo(1).run(fit, replace(run, degrees=Degrees()))[0][1]
    found = gloo(2).run(fit, run)[0][1]
    assert found["head.weight"].dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert_all_close_relative(found, expected, "weights", 2e-2)


class Drawing(Plain):
    """Notes what torch, in and outside of steps, draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[float] = []
        self.outside: list[float] = []

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        self.inside.append(float(torch.rand(())))
        return super().training_step(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.outside.append(float(torch.rand(())))


def draws() -> tuple[list[float], list[float]]:
    torch.manual_seed(torch.distributed.get_rank())
    run, module = Run(Degrees(context=2)), Drawing()
    trainer(run, 2).fit(module, data(run))
    return module.inside, module.outside


def test_random_numbers_differ_between_shards_only_in_steps(gloo: Pools) -> None:
    (inside, outside), (other_inside, other_outside) = gloo(2).run(draws)
    assert outside == other_outside
    assert len({*inside, *other_inside}) == len(inside) + len(other_inside)


class Faulty(Plain):
    """Does one of several things that cannot give the right numbers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        if self.fault == "no attention":
            logits = self.head(self.embedding(batch["input_ids"]))
            return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        if self.fault == "no labels":
            return self(batch["input_ids"], batch["position_ids"]).mean()
        if self.fault == "part of a layer":
            return self.blocks[0].qkv(self.embedding(batch["input_ids"])).mean()
        return super().training_step(batch)

    def configure_optimizers(self) -> Any:
        parameters = self.parameters()
        if self.fault == "stale optimizer":
            parameters = Plain().parameters()
        return torch.optim.SGD(parameters, lr=0.1)


def faulty(fault: str, degrees: Degrees) -> None:
    batches = samples(2)
    if fault == "no labels":
        batches = [{"input_ids": sample["input_ids"]} for sample in batches]
    made = trainer(Run(degrees), torch.distributed.get_world_size())
    made.fit(Faulty(fault), DataLoader(batches, batch_size=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no attention", "no attention call"),
        ("no labels", "has no shift_labels"),
        ("stale optimizer", "OptimizerCallable"),
        ("part of a layer", "call the layer itself"),
    ],
)
def test_refusals(gloo: Pools, fault: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        gloo(2).run(faulty, fault, Degrees(context=2))


class PlainMean(Plain):
    def training_step(self, batch: dict[str, Any]) -> Tensor:
        loss = super().training_step(batch)
        self.log("loss", loss, sync_dist=True)
        self.log("rank", float(self.global_rank), on_epoch=True, sync_dist=True, batch_size=1 + 2 * self.global_rank)
        return loss


def warned() -> tuple[list[str], float]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(Degrees(context=2))
        made = trainer(run, 2)
        made.fit(PlainMean(), data(run))
    found = [str(warning.message) for warning in caught if "log_tokens" in str(warning.message)]
    return found, float(made.callback_metrics["rank_epoch"])


def test_plain_means_are_warned_of_once(gloo: Pools) -> None:
    first, second = gloo(2).run(warned)
    assert len(first[0]) == 1
    assert first[1] == second[1] == pytest.approx(3 / 4)  # weighted by the batch sizes 1 and 3


class NoLoader:
    """Yields whole batches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for sample in samples(self.count):
            yield {key: value[None] for key, value in sample.items()}


def whole_batches() -> tuple[list[float], dict[str, Tensor]]:
    """Batches from an iterable that is no DataLoader arrive whole."""
    run = Run(Degrees(context=2))
    module = build(run)
    trainer(run, 2).fit(module, NoLoader(run.num_samples))
    return module.norms, weights(module)


def test_other_iterables_are_cut_too(gloo: Pools) -> None:
    norms, expected = gloo(1).run(fit, Run())[0]
    found_norms, found = gloo(2).run(whole_batches)[0]
    assert found_norms == pytest.approx(norms, rel=FLOAT32)
    assert_all_close_relative(found, expected, "weights")


def test_nothing_happens_at_construction() -> None:
    LongContextStrategy(Degrees(context=8, inner_ring=4))
    assert not torch.distributed.is_initialized()


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="zigzagged"):
        LongContextStrategy(layout="zigzagged")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sharding='ddp'"):
        LongContextStrategy(sharding="ddp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sync_batchnorm"):
        Trainer(strategy=LongContextStrategy(), devices=1, sync_batchnorm=True, **QUIET)  # type: ignore[arg-type]


def test_degrees_are_checked_when_the_trainer_is_made() -> None:
    with pytest.raises(ValueError, match=r"context=3 .* does not divide the 4 processes"):
        Trainer(strategy=LongContextStrategy(Degrees(context=3)), devices=4, **QUIET)  # type: ignore[arg-type]
