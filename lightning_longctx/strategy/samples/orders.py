"""Global orders of samples: what they are depends on the seed and the epoch, never on ranks or on what was drawn."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from lightning_longctx._upstream import collect_rng_states, set_rng_states
from lightning_longctx.attention.dropout import mixed_seed


class Order(Protocol):
    """The samples of an epoch (indices, or whole batches of them), one after another."""

    seed: int

    def __len__(self) -> int:
        """How many there are in an epoch."""
        ...

    def take(self, epoch: int, positions: range) -> list[Any]:
        """What stands at these positions of the epoch's order."""
        ...

    def state(self) -> dict[str, Any]:
        """Plain values that ``load`` needs to draw the current epoch again, and by which another order is noticed."""
        ...

    def load(self, state: dict[str, Any], inside: bool) -> None:
        """Continue as the one whose state this is, inside its epoch or with the next one.

        Raises:
            ValueError: This is another order.
        """
        ...


class IndexOrder:
    """All indices of a dataset, in turn or shuffled as ``torch.utils.data.DistributedSampler`` shuffles them.

    Args:
        num_samples: Length of the dataset.
        shuffle: Whether to shuffle, anew in every epoch.
        seed: Of the shuffling.
    """

    def __init__(self, num_samples: int, shuffle: bool, seed: int) -> None:
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def take(self, epoch: int, positions: range) -> list[int]:
        if not self.shuffle:
            return list(positions)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.num_samples, generator=generator)
        return order[positions.start : positions.stop : positions.step].tolist()

    def state(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "shuffle": self.shuffle, "seed": self.seed}

    def load(self, state: dict[str, Any], inside: bool) -> None:
        if inside:
            _compare("num_samples", "samples in the dataset", state, self.num_samples)
            _compare("shuffle", "for `shuffle`", state, self.shuffle)
        self.seed = state["seed"]


class DrawnOrder:
    """What a sampler or batch sampler of the user's yields, drawn whole at the start of an epoch.

    Random numbers it draws from the generators of Python, NumPy and torch depend on the seed and the epoch only, and
    those generators go on as if nothing had been drawn. A generator of its own (an attribute ``generator``) goes on
    from epoch to epoch and is part of the state. ``set_epoch`` is called where it exists, on a batch sampler's
    ``sampler`` too.

    Args:
        sampler: With a length, the same on every rank.
        seed: Of what it draws.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self._drawn: tuple[int, list[Any]] | None = None  # of the current epoch
        self._checksum: tuple[int, int] | None = None
        self._before: torch.Tensor | None = None  # of the sampler's own generator, before it drew them
        self._expected: tuple[int, int] | None = None  # what an epoch's order must turn out to be

    def __len__(self) -> int:
        return len(self.sampler)

    def take(self, epoch: int, positions: range) -> list[Any]:
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self._draw(epoch))
        return self._drawn[1][positions.start : positions.stop : positions.step]

    def checksum(self, epoch: int) -> int:
        """Of an epoch's order, in 62 bits."""
        if self._checksum is None or self._checksum[0] != epoch:
            self.take(epoch, range(0))
            assert self._drawn is not None
            self._checksum = (epoch, _checksum(self._drawn[1]))
        return self._checksum[1]

    def state(self) -> dict[str, Any]:
        epoch = 0 if self._drawn is None else self._drawn[0]
        sums, generator = (epoch, self.checksum(epoch)), self._own_generator()
        after = None if generator is None else generator.get_state()
        generators = {"generator": self._before, "next_generator": after}
        return {"num_samples": len(self), "seed": self.seed, "checksum": sums, **generators}

    def load(self, state: dict[str, Any], inside: bool) -> None:
        if inside:
            _compare("num_samples", f"entries of {type(self.sampler).__name__}", state, len(self))
            self._expected = tuple(state["checksum"])
        self.seed, self._drawn = state["seed"], None
        before = state["generator"] if inside else state["next_generator"]
        if (generator := self._own_generator()) is not None and before is not None:
            generator.set_state(before)

    def _draw(self, epoch: int) -> list[Any]:
        for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        generator = self._own_generator()
        self._before = None if generator is None else generator.get_state()
        with _drawing_from(mixed_seed(self.seed, epoch)):
            items = list(self.sampler)
        name = type(self.sampler).__name__
        if len(items) != len(self):
            raise ValueError(f"{name} yields {len(items)} entries, but its length is {len(self)}: correct __len__.")
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == epoch:
            if _checksum(items) != expected[1]:
                raise ValueError(
                    f"{name} draws another order for epoch {epoch} than when the checkpoint was made, so samples would "
                    "be repeated or left out. Let its order follow from set_epoch(epoch), from a torch.Generator in "
                    "its attribute `generator`, or from the generators of Python, NumPy and torch."
                )
        return items

    def _own_generator(self) -> torch.Generator | None:
        for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
            if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                return generator
        return None


def _compare(key: str, what: str, state: dict[str, Any], now: Any) -> None:
    if state.get(key) != now:
        raise ValueError(
            f"the checkpoint was made in an epoch over {state.get(key)} {what}, and now there are {now}: the order of "
            "samples is another one, and the epoch cannot be continued. Use the same data, or load weights only "
            "(ckpt_path=None and load_state_dict)."
        )


def _checksum(items: list[Any]) -> int:
    flat = all(type(item) is int for item in items)
    written = np.asarray(items, dtype=np.int64).tobytes() if flat else repr(items).encode()
    return int.from_bytes(hashlib.blake2b(written, digest_size=8).digest()) & (2**62 - 1)


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    before = collect_rng_states(include_cuda=False)
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        set_rng_states(before)
