"""What can be compared: a *case* says what to compute, a *system* is one way to compute it on some ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor


@dataclass(frozen=True)
class Job:
    """One system on one rank, ready to run.

    Args:
        run: One forward and backward; returns this rank's results. What is timed.
        part: Cuts a whole result to what this rank should have.
        sent_bytes: Bytes this rank has sent so far, by link (``inner``, ``outer``).
        close: Frees process groups and the like; a collective.
        finish: Makes of what ``run`` returns this rank's results by name. Not timed.
        expected: Whole results by name, where they are not the case's: of a yardstick whose time is scaled.
    """

    run: Callable[[], Any]
    part: Callable[[Tensor], Tensor]
    sent_bytes: Callable[[], Mapping[str, int]]
    close: Callable[[], None]
    finish: Callable[[Any], dict[str, Tensor]] = dict
    expected: Callable[[], dict[str, Tensor]] | None = None


class Case(Protocol):
    """What is computed; a frozen value, the same on every rank."""

    def small(self) -> Self:
        """The same at a size at which it can be checked in no time."""
        ...

    def expected(self) -> dict[str, Tensor]:
        """Whole results by name, in float64, computed in this process by the plain formula."""
        ...

    @property
    def tolerance(self) -> float:
        """Largest relative error, by norm, of a result that only rounds differently."""
        ...


class System(Protocol):
    """A way to compute a case. Frozen and picklable: it travels to the ranks."""

    @property
    def name(self) -> str:
        """As the ``system`` column has it."""
        ...

    def num_ranks(self, case: Any) -> int:
        """How many ranks take part, from rank 0 on; the others sleep meanwhile."""
        ...

    def describe(self, case: Any) -> dict[str, str]:
        """The columns ``layout`` and ``schedule``; empty where they mean nothing."""
        ...

    def setup(self, case: Any, rank: int) -> Job:
        """Make inputs and process groups on one of the ranks that take part (a collective over them)."""
        ...
