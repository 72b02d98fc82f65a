"""Settings of CUDA's caching allocator against fragmentation, made before CUDA starts.

Sequences of many lengths ask for blocks of many sizes. With expandable segments a block grows in place, and freed
neighbours are one again, so that memory which is reserved but too scattered to use does not pile up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_longctx._upstream import allocator_settings

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where PyTorch looks for settings; the first one that is set counts (``c10/cuda/CUDAAllocatorConfig.h``, 2.13)."""

SETTING = "expandable_segments:True"
_VARIABLE = VARIABLES[-1]


class Allocator(NamedTuple):
    """What is decided.

    Args:
        environment: To be set.
        report: For the user.
    """

    environment: dict[str, str]
    report: str


def choose_allocator(environment: Mapping[str, str], started: bool) -> Allocator:
    """What to set, and what to say. What the user has set stays as it is.

    Args:
        environment: Of the process.
        started: CUDA runs already, with settings that cannot be changed.
    """
    named = next((name for name in VARIABLES if name in environment), None)
    if named is not None:
        report = f"CUDA allocator: {named}={environment[named]}, as set in the environment."
        if "expandable_segments" not in environment[named]:
            report += f" {SETTING} there would prevent fragmentation."
        return Allocator({}, report)
    if started:
        return Allocator(
            {},
            "CUDA allocator: PyTorch's default, as CUDA had started before the Trainer was made. Memory may fragment: "
            f"set {_VARIABLE}={SETTING} in the environment, or touch CUDA only after that.",
        )
    report = f"CUDA allocator: {_VARIABLE}={SETTING}, against fragmentation. Set {_VARIABLE} yourself for another one."
    return Allocator({_VARIABLE: SETTING}, report)


def prepare_allocator(device_type: str) -> None:
    """Choose settings for this process and those that it launches, and log them once per Trainer; on CUDA only.

    Args:
        device_type: That the run will use.
    """
    if device_type != "cuda":
        return
    chosen = choose_allocator(os.environ, torch.cuda.is_initialized())
    os.environ.update(chosen.environment)
    read = allocator_settings()
    if chosen.environment and read is not None and SETTING not in read:
        # PyTorch reads the environment once, when somebody first asks.
        del os.environ[_VARIABLE]
        chosen = choose_allocator(os.environ, started=True)
    rank_zero_info(chosen.report)
