"""Which random numbers ranks share, and which they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_longctx._upstream import collect_rng_states, set_rng_states

Broadcast = Callable[[Any], Any]


def share_rng(broadcast: Broadcast) -> int:
    """Continue with rank 0's random state (Python, NumPy, torch) everywhere: samplers must draw the same on all ranks.

    Returns:
        A seed that is the same on all ranks.
    """
    states, seed = broadcast((collect_rng_states(include_cuda=False), torch.initial_seed()))
    set_rng_states(states)
    return seed


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


def mixed_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers (FNV-1a over 64-bit words)."""
    mixed = 0xCBF29CE484222325
    for number in numbers:
        mixed = ((mixed ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return mixed >> 1
