"""One rank's loss or gradient is not finite: all ranks raise the same error, or all skip the same step."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, LongContextStrategy
from lightning_longctx.callbacks import GradientNorm
from lightning_longctx.testing import RankError
from tests.cases.tiny import QUIET, TINY, assert_equal_numbers, data_rank, named_weights, samples, tiny_decoder
from tests.cases.tiny import token_losses as losses_of

ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)  # a large eps does not amplify rounding
STEPS = 4


@dataclass(frozen=True)
class Case:
    """Four optimizer steps. Rank ``rank`` spoils micro-batch ``batch``: its loss and with it the gradient, its loss
    alone (``added``), or its gradient alone; nothing if ``batch`` is None.
    """

    degrees: Degrees = Degrees(context=2)
    sharding: str = "replicate"
    what: str = "loss"
    rank: int = 1
    batch: int | None = 2
    accumulate: int = 1
    clip: float | None = None
    manual: bool = False
    mode: str = "skip"

    @property
    def skipped(self) -> int | None:
        """The optimizer step that must not happen."""
        return None if self.batch is None else self.batch // self.accumulate


class Spoilt(CausalLM):
    """Trains with AdamW and a schedule."""

    def __init__(self, case: Case) -> None:
        super().__init__(TINY, optimizer=ADAMW, lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1))
        self.case = case
        self.automatic_optimization = not case.manual

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch)
        if batch_idx == self.case.batch and dist.get_rank() == self.case.rank:
            loss = self.spoilt(loss)
        if self.case.manual:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.case.clip is not None:
                self.clip_gradients(optimizer, self.case.clip, "norm")
            optimizer.step()
        return loss

    def spoilt(self, loss: Tensor) -> Tensor:
        if self.case.what == "gradient":
            loss.register_hook(lambda gradient: gradient * float("inf"))
            return loss
        return loss + float("inf") if self.case.what == "added" else loss * float("nan")


def train(case: Case, folder: Path | None = None) -> tuple[dict[str, Tensor], set[float], float, int]:
    """Weights, step counts of the optimizer, learning rate, and how many steps were skipped."""
    torch.manual_seed(0)
    rank, num_ranks = data_rank(case.degrees)
    keywords: Any = dict(layout="zigzag", sharding=case.sharding, nonfinite_gradients=case.mode)
    strategy = LongContextStrategy(case.degrees, **keywords)
    options: dict[str, Any] = QUIET | dict(
        devices=dist.get_world_size(), max_epochs=1, log_every_n_steps=1, callbacks=[GradientNorm()]
    )
    if folder is not None:
        options["logger"] = CSVLogger(folder, name="", version="")
    clip = None if case.manual else case.clip
    trainer = Trainer(strategy=strategy, accumulate_grad_batches=case.accumulate, gradient_clip_val=clip, **options)
    module = Spoilt(case)
    made = samples(STEPS * case.accumulate * num_ranks)[rank::num_ranks]
    trainer.fit(module, DataLoader(made, batch_size=1))  # type: ignore[arg-type]
    assert trainer.global_step == STEPS
    optimizer = trainer.optimizers[0]
    counts = {float(optimizer.state[weight]["step"]) for weight in module.parameters()}
    return named_weights(module), counts, optimizer.param_groups[0]["lr"], strategy.num_skipped_steps


def by_hand(case: Case) -> tuple[dict[str, Tensor], float]:
    """The same steps in one process, without the skipped one; the schedule goes on."""
    decoder = tiny_decoder()
    optimizer = ADAMW(decoder.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    size = case.accumulate * (case.degrees.data if isinstance(case.degrees.data, int) else 1)
    made = samples(STEPS * size)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses_of(decoder, made[step * size : (step + 1) * size]).mean().backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(decoder.parameters(), case.clip)
        if step != case.skipped:
            optimizer.step()
        if not case.manual:  # where steps are made by hand, so are the schedule's
            schedule.step()
    named = {f"decoder.{name}": weight.detach() for name, weight in decoder.named_parameters()}
    return named, optimizer.param_groups[0]["lr"]


CASES = [
    Case(),
    Case(sharding="fsdp", what="gradient", clip=0.1),
    Case(Degrees(data=2), sharding="fsdp", what="added"),
    Case(accumulate=3, batch=4, clip=0.1),
    Case(manual=True, clip=0.1),
    Case(batch=None, clip=0.1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_skip_the_same_step(gloo: Any, case: Case) -> None:
    """B51: weights and moments of all ranks are those of a run that leaves the step out; the schedule goes on."""
    expected, rate = by_hand(case)
    num_skipped = 0 if case.skipped is None else 1
    results = gloo(2).run(train, case)
    for weights, counts, lr, skipped in results:
        assert_equal_numbers(weights, expected, 1e-4)
        assert counts == {STEPS - num_skipped} and skipped == num_skipped
        assert lr == pytest.approx(rate)
        assert all(torch.equal(weight, results[0][0][name]) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case(),
            r"optimizer step 2: the loss of rank 1 in micro-batch 0 is not finite, and so is the gradient of deco",
        ),
        (Case(rank=0, sharding="fsdp"), r"optimizer step 2: the loss of rank 0 in micro-batch 0 is not finite"),
        (Case(accumulate=3, batch=4), r"optimizer step 1: the loss of rank 1 in micro-batch 1 is not finite, and so"),
        (Case(Degrees(data=2), what="added"), r"the loss of rank 1 in micro-batch 0 is not finite\. Weights are those"),
        (
            Case(what="gradient"),
            r"optimizer step 2: the gradient of decoder\.\S+ is not finite, in the part that ranks 0",
        ),
        (Case(manual=True, clip=0.1), r"optimizer step 2: the loss of rank 1 in micro-batch 0 is not finite"),
    ],
    ids=str,
)
def test_all_ranks_raise_the_same_error(gloo: Any, case: Case, message: str) -> None:
    """B51: it names rank, step and parameter."""
    with pytest.raises(RankError, match=message) as caught:
        gloo(2).run(train, replace(case, mode="raise"))
    assert len(caught.value.failures) == 2, "every rank says it"


def test_a_rank_without_tokens_is_no_fault(gloo: Any) -> None:
    """The label of the first sample is on rank 0, and rank 1's loss, 0/0, counts as 0."""
    case = Case(batch=0, mode="raise")
    expected, _ = by_hand(replace(case, batch=None))
    for weights, _, _, skipped in gloo(2).run(train, case):
        assert_equal_numbers(weights, expected, 1e-4)
        assert skipped == 0


def test_skips_are_counted_in_the_log(gloo: Any, tmp_path: Path) -> None:
    gloo(2).run(train, Case(clip=0.1), tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["skipped_steps"]]
    assert [float(row["skipped_steps"]) for row in rows] == [0, 0, 1, 1]
    assert [row["grad_norm"] == "nan" for row in rows] == [False, False, True, False]
