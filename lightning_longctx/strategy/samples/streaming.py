"""Training loaders without an order of samples: how far they are, and how they get there again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from itertools import chain
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from lightning_longctx import _upstream
from lightning_longctx.strategy.samples.around import LoaderAround

NUM_RECENT = 3
"""Batches whose state is kept: Lightning may have fetched one that no step has seen yet."""

COUNTED = ("batch_size", "num_workers", "drop_last")
"""Options of a ``DataLoader`` that decide which samples are in its first batches."""


class StreamLoader(LoaderAround):
    """A training loader that can continue inside an epoch.

    A loader with ``state_dict`` and ``load_state_dict``, or a dataset with both and no workers, is set to the state it
    had; any other is read from the start of the epoch, and what was trained on is thrown away.

    Args:
        loader: Any iterable of batches.
        place: This process's data rank, and how many there are.
    """

    def __init__(self, loader: Any, place: tuple[int, int]) -> None:
        own: dict[str, Any] = {"_recent": deque(maxlen=NUM_RECENT), "_next": None, "_finished": False, "_place": place}
        super().__init__(loader, **own)

    @property
    def _stateful(self) -> Any:
        if _has_state(self.loader):
            return self.loader
        alone = isinstance(self.loader, DataLoader) and self.loader.num_workers == 0
        return self.loader.dataset if alone and _has_state(self.loader.dataset) else None

    @property
    def _counted(self) -> dict[str, Any]:
        counts = isinstance(self.loader, DataLoader) and self._stateful is None
        return {name: getattr(self.loader, name) for name in COUNTED} if counts else {}

    def position(self, batch: int) -> dict[str, Any]:
        """Plain values from which ``continue_at`` finds the place after ``batch`` batches of the epoch."""
        state = None
        if self._stateful is not None:
            known = dict(self._recent)
            state = known[batch] if batch in known else deepcopy(self._stateful.state_dict())
        return {"batch": batch, "state": state, "finished": self._finished, "options": self._counted}

    def continue_at(self, position: dict[str, Any]) -> None:
        """Begin the next iteration there.

        Raises:
            ValueError: The loader had a state when it was saved and has none now, or the other way round; or inside an
                epoch as many batches of this loader would be other samples.
        """
        had, has = position["state"] is not None, self._stateful is not None
        if had != has and (had or position["batch"] > 0):
            names = "has state_dict and load_state_dict" if has else "has no state_dict and load_state_dict"
            raise ValueError(
                f"{type(self.loader).__name__} {names}, unlike the loader that the checkpoint was made with: it cannot "
                "be set to where that one was. Use the same kind of loader."
            )
        options = position["options"].items() if position["batch"] > 0 else ()
        for name, then in options:
            now = self._counted.get(name, then)
            if now != then:
                raise ValueError(
                    f"{name}={now}: the checkpoint was made after {position['batch']} batches of an epoch of a stream "
                    f"with {name}={then}, and as many batches of this loader are other samples. Use {name}={then}, or "
                    "resume from a checkpoint at the end of an epoch."
                )
        self._next = position

    def __iter__(self) -> Iterator[Any]:
        position, self._next = self._next, None
        number = 0 if position is None else position["batch"]
        self._finished = False
        self._recent.clear()
        if position is not None and position["state"] is not None:
            self._load(position)
            self._recent.append((number, deepcopy(position["state"])))
        batches = iter(self.loader)
        if position is not None and position["state"] is None and number > 0:
            rank_zero_info(f"reading {number} batches of {type(self.loader).__name__} again, to go on after them.")
            for _ in range(number):
                next(batches)
        length = sized_len(self.loader) if self._stateful is not None else None
        while (batch := next(batches, self)) is not self:
            number += 1
            if self._stateful is not None:
                self._recent.append((number, deepcopy(self._stateful.state_dict())))
            if number == length and (ahead := next(batches, self)) is not self:
                batches = chain([ahead], batches)  # the length was wrong
            elif number == length:
                self._finished = True  # Lightning counts, and would leave the loader one step before its end
            yield batch
        self._finished = True

    def _load(self, position: dict[str, Any]) -> None:
        streaming = _upstream.is_litdata(self.loader)
        with _upstream.litdata_place(*self._place) if streaming else nullcontext():
            self._stateful.load_state_dict(deepcopy(position["state"]))
        if position["batch"] > 0 or position["finished"]:
            return
        if streaming:
            raise ValueError(
                "the checkpoint was made between two epochs of a litdata StreamingDataLoader that ended before the "
                "data did (limit_train_batches, max_steps), and it cannot be told to begin another epoch. Resume from "
                "a checkpoint inside an epoch, or let epochs end with the data."
            )
        iter(self.loader)  # the epoch ended before the data did: the next one begins as it would have


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
