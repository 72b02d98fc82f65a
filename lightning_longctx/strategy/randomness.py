"""Which random numbers ranks share, and which they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_longctx._upstream import collect_rng_states, set_rng_states
from lightning_longctx.attention.dropout import StepDraws, drawing, mixed_seed
from lightning_longctx.topology import Degrees, axis_rank

Broadcast = Callable[[Any], Any]


def share_rng(broadcast: Broadcast) -> int:
    """Continue with rank 0's random state (Python, NumPy, torch) everywhere: samplers must draw the same on all ranks.

    Returns:
        A seed that is the same on all ranks.
    """
    states, seed = broadcast((collect_rng_states(include_cuda=False), torch.initial_seed()))
    set_rng_states(states)
    return seed


def step_draws(seed: int, step: int, degrees: Degrees, rank: int) -> StepDraws:
    """What attention drops in a training step: alike on all ranks that share sequences.

    A row's number is its place in the global batch, of which samplers deal one row after another to the data ranks.

    Args:
        seed: Shared by all ranks.
        step: Number of the training step.
        degrees: Resolved degrees.
        rank: Global rank.
    """
    return StepDraws(mixed_seed(seed, step), axis_rank(degrees, rank, "data"), degrees.shape[0])


@contextmanager
def step_randomness(draws: StepDraws, seed: int, place: int, step: int, device: torch.device) -> Iterator[None]:
    """All random numbers of a training step: attention's, and torch's own ones.

    Args:
        draws: For attention.
        seed: Shared by all ranks.
        place: This rank's place among those that hold different tokens.
        step: Number of the training step.
        device: The one that is trained on.
    """
    with drawing(draws), own_randomness(seed, place, step, device):
        yield


@contextmanager
def own_randomness(seed: int, rank: int, step: int, device: torch.device) -> Iterator[None]:
    """Inside, torch draws numbers that no other rank and no other step draws; outside, nothing has happened.

    So ``nn.Dropout`` differs between the shards of a sequence, while samplers and workers, which draw outside, still
    agree. Stateless, hence the same again after a resume.

    Args:
        seed: Shared by all ranks.
        rank: Place among the ranks that hold different tokens.
        step: Number of the training step.
        device: The one that is trained on.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(mixed_seed(seed, rank, step))
        yield
