"""Data ranks that run out of batches at different times: ask before each batch, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_longctx.strategy.samples.around import LoaderAround

Gather = Callable[[int], list[int]]
"""Takes a number from every data rank and returns all of them, by data rank. Collective over the data ranks."""

ENDED, READY, FAILED = 0, 1, 2
"""What a data rank says before each batch."""


@dataclass(frozen=True)
class DataRanks:
    """The data axis as a loader sees it.

    Args:
        rank: This process's data rank.
        num_ranks: How many there are.
        gather: Exchanges numbers with the data ranks at this process's place on the other axes (see ``gather_over``).
        seed: Seeds the randomness of workers; must be the same on all ranks.
        order_seed: Seeds the order of samples; the same.
        gather_values: As ``gather``, of any values that can be pickled.
    """

    rank: int
    num_ranks: int
    gather: Gather
    seed: int = 0
    order_seed: int = 0
    gather_values: Callable[[Any], list[Any]] = lambda value: [value]


def gather_over(group: dist.ProcessGroup | None, device: torch.device) -> Gather:
    """A ``Gather`` over a process group; ``device`` is one its backend can send from."""

    def gather(value: int) -> list[int]:
        mine = torch.tensor([value], dtype=torch.int64, device=device)
        every = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, mine, group=group)
        return torch.cat(every).tolist()

    return gather


def gather_values_over(group: dist.ProcessGroup | None) -> Callable[[Any], list[Any]]:
    """The same for any values that can be pickled."""

    def gather_values(value: Any) -> list[Any]:
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, value, group=group)
        return every

    return gather_values


class AgreeingLoader(LoaderAround):
    """A loader that yields a batch only when every data rank has one.

    Stands in front of a loader of unknown length.

    Args:
        loader: Any iterable of batches.
        ranks: The data ranks that must agree.
        training: True stops all ranks with the first one that ends, and says so once; False raises if they end apart,
            because a mean over part of the data is not the mean.
    """

    def __init__(self, loader: Any, ranks: DataRanks, *, training: bool) -> None:
        super().__init__(loader, _ranks=ranks, _training=training, _warned=False)

    def __iter__(self) -> Iterator[Any]:
        """Batches for as long as every data rank has one. Nothing is started before the first is asked for.

        Raises:
            RuntimeError: A data rank failed to fetch; or data ranks end at different times in evaluation, or before
                the first batch. Raised on every data rank.
        """
        batches: Iterator[Any] | None = None
        num_fetched = 0
        while True:
            try:
                batches = iter(self.loader) if batches is None else batches
                batch, state = _fetch(batches)
            except Exception:
                self._ranks.gather(FAILED)  # the others must not wait for this rank, whose own error goes on from here
                raise
            states = self._ranks.gather(state)
            if any(other != READY for other in states):
                self._end(states, num_fetched)
                return
            yield batch
            num_fetched += 1

    def _end(self, states: list[int], num_fetched: int) -> None:
        ended, ready, failed = (
            [rank for rank, other in enumerate(states) if other == state] for state in (ENDED, READY, FAILED)
        )
        if failed:
            raise RuntimeError(f"data ranks {failed} failed to fetch batch {num_fetched}: see their own error.")
        if not ready:
            return
        what = f"data ranks {ended} ended after {num_fetched} batches, data ranks {ready} have more"
        if not self._training or num_fetched == 0:
            raise RuntimeError(
                f"{what}. Let every data rank have the same number of batches, use trainer.limit_*_batches, or "
                "set data=1."
            )
        if not self._warned:
            rank_zero_warn(f"{what}: the epoch ends here on all of them.")
            self._warned = True


def _fetch(batches: Iterator[Any]) -> tuple[Any, int]:
    try:
        return next(batches), READY
    except StopIteration:
        return None, ENDED
