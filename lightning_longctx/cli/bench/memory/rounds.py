"""Policies that take turns: A B C A B C, so that a machine that gets slower does so for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning.pytorch import Trainer

from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.memory.meter import Step
from lightning_longctx.cli.bench.report import duration, size
from lightning_longctx.memory.choice.costs import predict
from lightning_longctx.memory.choice.table import fixed_plans
from lightning_longctx.memory.plans import MemoryPlan, fixed_plan
from lightning_longctx.memory.policy import Checkpointing, PolicyName
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.step_memory import StepMemory

SETTLING_TOKENS = 256


class Promise(NamedTuple):
    """What a solved plan has to keep.

    Args:
        budget: Bytes that a step may take.
        predicted: Bytes that it should take.
    """

    budget: int
    predicted: int


class Rounds:
    """A conductor (see ``metered``) of one step of every policy in turn, round after round.

    In the last warm-up round the bytes of tensors are counted, too.

    Args:
        policies: Their names. ``auto`` is the plan that the strategy has come to in the steps before;
        auto_budgets: or with a number, as many plans, for budgets from what ``full`` takes to what ``none`` takes.
        tokens: Length of the sequences.
        warmup: Rounds whose times do not count, at least one.
        repeats: Rounds after those.
    """

    def __init__(
        self, policies: Sequence[PolicyName], tokens: int, warmup: int, repeats: int, auto_budgets: int | None = None
    ) -> None:
        self._policies, self._tokens, self._auto_budgets = policies, tokens, auto_budgets
        self._warmup, self._num_rounds = warmup, warmup + repeats
        self._turns: list[tuple[int, str]] = []
        self._plans: dict[str, MemoryPlan] = {}
        self._turn = 0
        self.steps: dict[str, list[Step]] = {}
        """The measured steps of every policy; those of warm-up rounds come first."""
        self.promises: dict[str, Promise] = {}
        """What was predicted of plans that were solved for."""

    @property
    def settling_tokens(self) -> int:
        """Short, but for ``auto``, which measures such a step as comes later, then solves for the rest."""
        return self._tokens if "auto" in self._policies else min(self._tokens, SETTLING_TOKENS)

    def begin(self, trainer: Trainer) -> int:
        """Make the plans, and put the first one in force."""
        memory = _strategy(trainer).memory
        if not memory.plan.blocks:
            raise WrongResultError("the model has no repeated blocks that could run again: all policies are one.")
        for name in self._policies:
            if name != "auto":
                self._plans[name] = fixed_plan(Checkpointing(policy=name), len(memory.plan.blocks))
            elif self._auto_budgets is None:
                self._plans[name] = memory.plan
            else:
                self._solve(memory, self._auto_budgets)
        self._turns = [(number, name) for number in range(self._num_rounds) for name in self._plans]
        self.steps = {name: [] for name in self._plans}
        memory.use(self._plans[self._turns[0][1]])
        return self._tokens

    def _solve(self, memory: StepMemory, num_budgets: int) -> None:
        """Plans for budgets at equal distances."""
        costs = memory.costs
        assert costs is not None, "auto has been measured in the steps before"
        least, most = (predict(costs, fixed_plans(costs)[name]).peak_bytes for name in ("full", "none"))
        for number in range(num_budgets):
            budget = least + (most - least) * number // (num_budgets - 1)
            name, plan = f"auto {number + 1}", memory.solve(budget)
            self._plans[name] = plan
            self.promises[name] = Promise(budget, predict(costs, plan).peak_bytes)

    def traced(self) -> bool:
        """In the last round of the warm-up."""
        return self._turns[self._turn][0] == self._warmup - 1

    def after(self, trainer: Trainer, step: Step) -> int | None:
        """Put the next policy in force."""
        self.steps[self._turns[self._turn][1]].append(step)
        self._turn += 1
        if self._turn == len(self._turns):
            return None
        _strategy(trainer).memory.use(self._plans[self._turns[self._turn][1]])
        return self._tokens

    def describe(self, step: Step) -> str:
        """Which step it was, and what it took."""
        number, name = self._turns[self._turn]
        warm = " (warm-up)" if number < self._warmup else ""
        took = f"{duration(step.seconds)}, {size(step.growth)}{warm}"
        return f"step {self._turn + 1} of {len(self._turns)}: {name}, {self._tokens:,} tokens: {took}"


def _strategy(trainer: Trainer) -> LongContextStrategy:
    assert isinstance(trainer.strategy, LongContextStrategy)
    return trainer.strategy
