"""What a checkpoint says of the run besides weights: seeds, random states and the place in the stream of samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_longctx.strategy.checkpoints.random_state import State, by_rank, of_rank, random_state, set_random_state
from lightning_longctx.topology import Degrees

KEY, VERSION = "longctx", 1
"""Under which name a checkpoint has it, and in which form."""


class Stream(Protocol):
    """The run's place in its data."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any], loops: dict[str, Any] | None = None) -> None: ...


def position(
    trainer: Trainer, degrees: Degrees, seed: int, stream: Stream, names: list[list[list[str]]], device: torch.device
) -> dict[str, Any]:
    """What to save, as plain values. A collective.

    Args:
        trainer: That trains.
        degrees: Resolved.
        seed: Shared by all ranks; with the number of the step it decides what is dropped.
        stream: The place in the data.
        names: Of the optimizers' parameters, by group, in their order.
        device: The one that is trained on.
    """
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, random_state(device))
    progress, place = trainer.fit_loop.epoch_loop.batch_progress, stream.state()
    ended = place.get("place", {}).get("ended", False)  # the next epoch's samples have not begun
    return {
        "version": VERSION,
        "degrees": asdict(degrees),
        "seed": seed,
        "random": by_rank(states),
        "inside_epoch": progress.current.ready > 0 and (ended or not progress.is_last_batch),
        "stream": place,
        "optimizers": names,
    }


def position_in(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """What ``position`` said when a checkpoint was saved; None if another strategy saved it.

    Raises:
        ValueError: A newer version of this package has written it.
    """
    saved = checkpoint.get(KEY)
    if saved is not None and saved["version"] > VERSION:
        raise ValueError(
            f"the checkpoint is of form {saved['version']}, this version of lightning-longctx reads up to {VERSION}: "
            "install the one that wrote it, or a newer one."
        )
    return saved


@dataclass
class RandomNumbers:
    """The random state that training goes on with, and when it has to be put back.

    Between epochs that is before the samples of the next one begin. Inside an epoch it is after: the saved run had
    drawn for that already.

    Args:
        state: Of this rank; None where there is nothing to restore, or no longer.
        inside_epoch: Whether the checkpoint was saved there.
    """

    state: State | None = None
    inside_epoch: bool = False

    def before_samples(self, device: torch.device) -> None:
        """Right before loaders begin where the checkpoint left them."""
        if not self.inside_epoch:
            self._restore(device)

    def before_training(self, device: torch.device) -> None:
        """Right before the first batch."""
        self._restore(device)

    def _restore(self, device: torch.device) -> None:
        state, self.state = self.state, None
        if state is not None:
            set_random_state(state, device)


def random_numbers(saved: dict[str, Any], degrees: Degrees, rank: int) -> RandomNumbers:
    """What this rank goes on with; on other degrees that is rank 0's, and one warning says what it cannot be."""
    was = Degrees(**saved["degrees"])
    if was != degrees:
        rank_zero_warn(
            f"The checkpoint was saved at {_named(was)}, this run has {_named(degrees)}. Weights, optimizers, "
            "schedules and the order of samples go on as they were. Random numbers that depend on the rank cannot: "
            "what nn.Dropout drops and what datasets draw differs from now on. Attention dropout is kept."
        )
    state = of_rank(saved["random"], rank if was == degrees else 0)
    return RandomNumbers(state, saved["inside_epoch"])


def _named(degrees: Degrees) -> str:
    sizes = {name: value for name, value in asdict(degrees).items() if isinstance(value, int)}
    return " x ".join(f"{name} {value}" for name, value in sizes.items() if value > 1) or "1 process"
