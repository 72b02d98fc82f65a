"""``bench kernels --tune``: search the block sizes of the Triton kernels, one kernel after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from statistics import median
from typing import Any

import torch

from lightning_longctx.cli.bench.attention_case import AttentionCase
from lightning_longctx.cli.bench.kernel_systems import KernelSystem, runs_of, seconds_of
from lightning_longctx.cli.bench.report import duration


def tuned(case: AttentionCase, repeats: int) -> Iterator[str]:
    """Find the fastest blocks on a GPU, and use them in this process.

    Yields:
        For each kernel one line on what was found.
    """
    blocks = import_module("lightning_longctx.kernels.blocks")
    dtype = getattr(torch, case.dtype)
    forward, both = runs_of(KernelSystem("triton", "cuda"), case)
    for which, run in (("forward", forward), ("dq", both), ("dkdv", both)):

        def seconds(candidate: Any, which: str = which, run: Callable[[], object] = run) -> float:
            blocks.use_blocks(which, case.width, dtype, candidate)
            seconds_of(run, "cuda")  # compiles
            return median(seconds_of(run, "cuda") for _ in range(repeats))

        before = blocks.blocks_for(which, case.width, dtype)
        best, taken = fastest(blocks.space(which, case.width, dtype), seconds, failures())
        blocks.use_blocks(which, case.width, dtype, best)
        yield f"{which}: {best} takes {duration(taken)}, {before} {duration(seconds(before))}"
        blocks.use_blocks(which, case.width, dtype, best)


def fastest(
    candidates: Iterable[Any], seconds: Callable[[Any], float], failing: tuple[type[Exception], ...]
) -> tuple[Any, float]:
    """The candidate that takes least, and what it takes.

    Args:
        candidates: What to try.
        seconds: Tries one.
        failing: Errors by which a candidate says that it does not fit this GPU.

    Raises:
        ValueError: None of them fits.
    """
    found: dict[Any, float] = {}
    for candidate in candidates:
        try:
            found[candidate] = seconds(candidate)
        except failing:
            continue
    if not found:
        raise ValueError("no blocks of the search space fit this GPU.")
    best = min(found, key=lambda candidate: found[candidate])
    return best, found[best]


def failures() -> tuple[type[Exception], ...]:
    """What Triton raises for blocks that need more shared memory or registers than there are."""
    errors = import_module("triton.runtime.errors")
    return (errors.OutOfResources, errors.PTXASError)
