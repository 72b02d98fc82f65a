"""Which length to try next: a search for the longest sequence whose step fits a budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 0.4
"""How far below the estimated limit to aim, in units of the resolution, so that the trial fits and the next one ends
the search."""

SURE_TRIALS = 4
"""Trials between a length that fits and one that does not, after which every other one halves what is between."""


@dataclass(frozen=True)
class Trial:
    """One step.

    Args:
        tokens: Length of its sequence.
        growth: Bytes by which memory grew in it, on the worst rank.
    """

    tokens: int
    growth: int


@dataclass(frozen=True)
class Search:
    """Grow by doubling at most, then narrow down, guided by a line through what was measured.

    Growth is nearly linear in the length, but it is measured: with noise, and not always monotone. So an estimate only
    chooses within what trials leave open, and what a trial has shown stands.

    Args:
        budget: Bytes.
        start: Length to begin at.
        multiple: Of which all lengths are multiples.
        resolution: Share of the longest length by which a longer one could be missed.
        max_tokens: No longer length is tried; None is no limit.
    """

    budget: int
    start: int
    multiple: int = 1
    resolution: float = 0.05
    max_tokens: int | None = None

    def next_length(self, trials: Sequence[Trial]) -> int | None:
        """What to try after these trials; None when the search has ended."""
        if not trials:
            return min(self._rounded(max(self.start, self.multiple)), self._most)
        low, high = self._bracket(trials)
        if not self.may_exceed(low):
            return None
        if high is None:
            return self._within(self._estimate(trials, low, None), low, min(2 * low, self._most))
        if high - low <= max(self.multiple, self.resolution * low):
            return None
        if low and self._num_refined(trials) >= SURE_TRIALS and self._num_refined(trials) % 2 == 0:
            return self._within((low + high) / 2, low, high - self.multiple)
        return self._within(self._estimate(trials, low, high), low, high - self.multiple)

    def longest(self, trials: Sequence[Trial]) -> Trial | None:
        """The longest that fits; None if none does."""
        return max(self._fitting(trials), key=lambda trial: trial.tokens, default=None)

    def may_exceed(self, tokens: int) -> bool:
        """Whether ``max_tokens`` would let a longer length be tried."""
        return tokens < self._most

    @property
    def _most(self) -> int:
        return 2**62 if self.max_tokens is None else self._rounded(self.max_tokens)

    def _fitting(self, trials: Sequence[Trial]) -> list[Trial]:
        return [trial for trial in trials if trial.growth <= self.budget]

    def _bracket(self, trials: Sequence[Trial]) -> tuple[int, int | None]:
        """The longest that fits, 0 if none does, and the shortest beyond it that does not, if any."""
        low = max((trial.tokens for trial in self._fitting(trials)), default=0)
        return low, min((trial.tokens for trial in trials if trial.tokens > low), default=None)

    def _num_refined(self, trials: Sequence[Trial]) -> int:
        """Trials since there is one that does not fit."""
        return next(len(trials) - 1 - index for index, trial in enumerate(trials) if trial.growth > self.budget)

    def _estimate(self, trials: Sequence[Trial], low: int, high: int | None) -> float:
        """The length to aim at: a little below the limit as the line has it, or, from there, as far as it may be."""
        grown = {trial.tokens: trial.growth for trial in trials}
        nearest = [low, high] if high is not None else sorted(grown)[-2:]
        if len(nearest) < 2:
            return 2 * low
        first, second = nearest
        slope = (grown[second] - grown.get(first, 0)) / (second - first)
        if slope <= 0:
            return 2 * low if high is None else (low + high) / 2
        limit = second - (grown[second] - self.budget) / slope
        below, beyond = limit * (1 - MARGIN * self.resolution), low * (1 + self.resolution)
        return below if below >= low * (1 + MARGIN * self.resolution) else beyond

    def _within(self, tokens: float, low: int, most: int) -> int:
        """A multiple above ``low`` and up to ``most``, which are multiples."""
        return max(low + self.multiple, min(self._rounded(tokens), most))

    def _rounded(self, tokens: float) -> int:
        return int(tokens // self.multiple) * self.multiple
