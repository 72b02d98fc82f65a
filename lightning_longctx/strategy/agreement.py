"""Data ranks that run out of batches at different times: ask before each batch, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

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
    """

    rank: int
    num_ranks: int
    gather: Gather
    seed: int = 0


def gather_over(group: dist.ProcessGroup | None, device: torch.device) -> Gather:
    """A ``Gather`` over a process group; ``device`` is one its backend can send from."""

    def gather(value: int) -> list[int]:
        mine = torch.tensor([value], dtype=torch.int64, device=device)
        every = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, mine, group=group)
        return torch.cat(every).tolist()

    return gather


class AgreeingLoader:
    """A loader that yields a batch only when every data rank has one.

    Stands in front of a loader of unknown length; everything else is looked up in, and set on, the loader itself.

    Args:
        loader: Any iterable of batches.
        ranks: The data ranks that must agree.
        training: True stops all ranks with the first one that ends, and says so once; False raises if they end apart,
            because a mean over part of the data is not the mean.
    """

    _own = ("loader", "_ranks", "_training", "_warned", "state_dict", "load_state_dict")

    def __init__(self, loader: Any, ranks: DataRanks, *, training: bool) -> None:
        self.loader = loader
        self._ranks = ranks
        self._training = training
        self._warned = False
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            # Lightning saves loaders that have both, and since Python 3.12 its check does not see __getattr__.
            self.state_dict = loader.state_dict
            self.load_state_dict = loader.load_state_dict

    def __getattr__(self, name: str) -> Any:
        if name in AgreeingLoader._own:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning resets a loader's iterator by assignment: that must reach the one who owns the workers.
        if name in AgreeingLoader._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader)

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
