"""What ranks conclude from each other's messages, and how often gradients are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.gradients import nonfinite
from lightning_longctx.strategy.gradients.nonfinite import Fault, GradientGuard, find_fault
from lightning_longctx.testing import GlooPool, assert_all_close_relative
from lightning_longctx.topology import Degrees
from tests.strategy.modules import Plain
from tests.strategy.runs import QUIET, Run, data, weights

Pools = Callable[[int], GlooPool]
NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([[1.0, -1, -1], [2.0, -1, -1]], None),
        ([[NAN, 3, -1], [NAN, 2, 1]], Fault((1,), 1, 2)),
        ([[NAN, 0, 2], [NAN, 0, 1]], Fault((1,), 1, 0)),
        ([[NAN, 0, 1], [NAN, 0, 1]], Fault((0, 1), 1, 0)),
        ([[1.0, -1, -1], [2.0, -1, 0]], Fault((1,), 0, None)),
        ([[1.0, -1, -1], [NAN, 4, -1]], Fault((1,), None, 4)),
        ([[NAN, 4, -1], [NAN, 4, -1], [1.0, 5, -1]], Fault((0, 1), None, 4)),
    ],
)
def test_the_first_fault_is_named(rows: list[list[float]], fault: Fault | None) -> None:
    assert find_fault(rows) == fault


def test_words() -> None:
    names = ["a", "b"]
    both = Fault((1, 2), 0, 1).describe(7, names)
    assert (
        both == "optimizer step 7: the loss of ranks 1, 2 in micro-batch 0 is not finite, and so is the gradient of b"
    )
    assert (
        Fault((3,), 2, None).describe(0, names) == "optimizer step 0: the loss of rank 3 in micro-batch 2 is not finite"
    )
    part = Fault((0,), None, 0).describe(1, names)
    assert part == "optimizer step 1: the gradient of a is not finite, in the part that rank 0 holds"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="nonfinite_gradients='ignore' is unknown; choose raise or skip"):
        LongContextStrategy(nonfinite_gradients="ignore")  # type: ignore[arg-type]


def test_the_first_loss_of_a_window_is_remembered() -> None:
    module, guard = nn.Linear(2, 2), GradientGuard("raise")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for value in (1.0, NAN, float("inf")):
        guard.watch(torch.tensor(value), first=False)
    with pytest.raises(RuntimeError, match="loss of rank 0 in micro-batch 1 is not finite. Weights"):
        guard.check(optimizer, module, 0)  # type: ignore[arg-type]
    guard.check(optimizer, module, 1)  # type: ignore[arg-type]  # a new window
    guard.watch(torch.tensor(NAN), first=False)
    guard.watch(torch.tensor(1.0), first=True)
    guard.check(optimizer, module, 2)  # type: ignore[arg-type]


class OwnClipping(Precision):
    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Something of its own."""


def test_a_plugin_that_clips_in_its_own_way_keeps_doing_so() -> None:
    guard, own, plain = GradientGuard("raise"), OwnClipping(), Precision()
    guard.take_clipping(own)
    guard.take_clipping(plain)
    assert "clip_grad_by_norm" not in vars(own) and own.clip_grad_by_value == guard.clip_grad_by_value
    assert plain.clip_grad_by_norm == guard.clip_grad_by_norm


class Scaling(Plain):
    """A user's hook may change gradients before they are clipped; the norm must be that of the changed ones."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(3.0)


def clipped(kind: type[LightningModule], run: Run, algorithm: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """Weights, optimizer steps, and messages about gradients."""
    torch.manual_seed(7)
    module, messages = kind(), []
    gather = nonfinite.gather_rows

    def counted(*args: Any) -> torch.Tensor:
        messages.append(args)
        return gather(*args)

    nonfinite.gather_rows = counted  # type: ignore[assignment]
    try:
        options = dict(max_epochs=1, gradient_clip_val=run.clip, gradient_clip_algorithm=algorithm)
        strategy = LongContextStrategy(run.degrees, sharding=run.sharding)  # type: ignore[arg-type]
        trainer = Trainer(strategy=strategy, devices=dist.get_world_size(), **options, **QUIET)  # type: ignore[arg-type]
        trainer.fit(module, data(run))
    finally:
        nonfinite.gather_rows = gather
    return weights(module), trainer.global_step, len(messages)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize(("kind", "per_step"), [(Plain, 1), (Scaling, 2)])
def test_one_message_per_step_unless_someone_changes_gradients(
    gloo: Pools, kind: type[Plain], per_step: int, algorithm: str
) -> None:
    run = Run(clip=0.01)
    expected, *_ = gloo(1).run(clipped, kind, run, algorithm)[0]
    spread = Run(Degrees(context=2), sharding="fsdp", clip=0.01)
    found, steps, messages = gloo(2).run(clipped, kind, spread, algorithm)[0]
    assert messages == steps * (per_step if algorithm == "norm" else 1)
    assert_all_close_relative(found, expected, "weights")
