"""Steps of growing length within a budget of memory."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_longctx.cli.bench.memory.meter import Step
from lightning_longctx.cli.bench.memory.search import Search, Trial
from lightning_longctx.cli.bench.report import duration
from lightning_longctx.memory.policy import GIB
from lightning_longctx.strategy import LongContextStrategy


class Trials:
    """A conductor (see ``metered``) of one real step for each length that a search wants to try.

    Args:
        system: Name, for progress.
        search: Which lengths.
    """

    def __init__(self, system: str, search: Search) -> None:
        self._system, self.search = system, search
        self.policy = "none"
        """Of the recipe; plain modules have none."""
        self._tried: list[Trial] = []
        self._steps: dict[int, Step] = {}

    @property
    def settling_tokens(self) -> int:
        """As long as the first trial."""
        first = self.search.next_length([])
        assert first is not None
        return first

    def begin(self, trainer: Trainer) -> int:
        """Look at the policy, and begin with the first length."""
        if isinstance(trainer.strategy, LongContextStrategy):
            self.policy = trainer.strategy.memory.plan.name
        return self.settling_tokens

    def traced(self) -> bool:
        """Never: the trace takes memory of its own."""
        return False

    def after(self, trainer: Trainer, step: Step) -> int | None:
        """Where the search goes on."""
        tokens = self._next
        self._tried.append(Trial(tokens, step.growth))
        self._steps[tokens] = step
        return self.search.next_length(self._tried)

    def describe(self, step: Step) -> str:
        """Which trial it was, and what it took."""
        fits = "fits" if step.growth <= self.search.budget else "does not fit"
        return f"{self._system}: {self._next:,} tokens {fits}: {step.growth / GIB:.3f} GiB, {duration(step.seconds)}"

    @property
    def longest(self) -> tuple[Trial, Step] | None:
        """The longest sequence that fits, and its step; None if none does."""
        trial = self.search.longest(self._tried)
        return None if trial is None else (trial, self._steps[trial.tokens])

    @property
    def shortest(self) -> Trial:
        """The shortest sequence that was tried."""
        return min(self._tried, key=lambda trial: trial.tokens)

    @property
    def _next(self) -> int:
        tokens = self.search.next_length(self._tried)
        assert tokens is not None
        return tokens
