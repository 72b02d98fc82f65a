"""What ``bench loss`` compares: ways to get from states to the sum of losses, and how they are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.rows import spread
from lightning_longctx.loss import linear_cross_entropy, token_cross_entropy
from lightning_longctx.memory.resident import peak_growth

LossSystem = Callable[[Tensor, Tensor, Tensor], Tensor]
"""States [N, width], matrix [V, width] and labels [N] to the sum of losses."""
_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
"""Of sums and gradients, in the Euclidean norm, relative to float64."""


@dataclass(frozen=True)
class LossCase:
    """Sizes of what is computed."""

    vocab: int
    tokens: int
    width: int
    dtype: str

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """States, matrix and labels; always the same ones."""
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(self.tokens, self.width, generator=generator)
        weight = torch.randn(self.vocab, self.width, generator=generator).mul_(self.width**-0.5)
        labels = torch.randint(self.vocab, (self.tokens,), generator=generator)
        labels[15::16] = -100
        dtype = getattr(torch, self.dtype)
        return states.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


@dataclass(frozen=True)
class LossMeasured:
    """What one system did."""

    name: str
    seconds: tuple[float, ...]
    peak_growth: int | None

    @property
    def seconds_median(self) -> float:
        """Median over the repeats."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest repeat over fastest, minus 1."""
        return spread(self.seconds)


def loss_systems(tile_tokens: int | None, peers: bool) -> dict[str, LossSystem]:
    """The systems by name, the one that is compared with first."""
    systems: dict[str, LossSystem] = {
        "untiled": lambda states, weight, labels: token_cross_entropy(F.linear(states, weight), labels)[0],
        "tiled": lambda *inputs: linear_cross_entropy(*inputs, tile_tokens=tile_tokens)[0],
    }
    if peers:
        options = torch.nn.LinearCrossEntropyOptions()
        systems["torch"] = lambda *inputs: F.linear_cross_entropy(*inputs, reduction="sum", options=options)
    return systems


def check_systems(systems: Mapping[str, LossSystem], case: LossCase) -> None:
    """Compare sums and gradients with those of float64, at 300 tokens at most.

    Raises:
        WrongResultError: A system's are others.
    """
    small = replace(case, tokens=min(case.tokens, 300))
    states, weight, labels = small.inputs()
    exact = (states.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), labels)
    expected = _step(systems["untiled"], exact)
    for name, system in systems.items():
        for what, actual, right in zip(
            ("sum", "states", "matrix"), _step(system, small.inputs()), expected, strict=True
        ):
            error = float((actual.double() - right).norm() / right.norm())
            if not error <= _TOLERANCES[case.dtype]:  # written so that NaN fails
                raise WrongResultError(
                    f"{name}: {'the' if what == 'sum' else 'the gradient of the'} {what} is off by {error:.2g}, of "
                    f"which {_TOLERANCES[case.dtype]:.2g} may be rounding. Checked on {small}."
                )


def measure_in_turn(systems: Mapping[str, LossSystem], case: LossCase, repeats: int, warmup: int) -> list[LossMeasured]:
    """Run all systems in turn, on one thread, so that a machine that slows down slows all of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        inputs = case.inputs()
        growth = {name: _growth(system, inputs, warmup) for name, system in systems.items()}
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(repeats):
            for name, system in systems.items():
                start = time.perf_counter()
                _step(system, inputs)
                seconds[name].append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return [LossMeasured(name, tuple(seconds[name]), growth[name]) for name in systems]


def _growth(system: LossSystem, inputs: Sequence[Tensor], warmup: int) -> int | None:
    for _ in range(warmup - 1):
        _step(system, inputs)
    return peak_growth(lambda: _step(system, inputs))


def _step(system: LossSystem, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The sum of losses, and gradients of states and matrix, of the mean as in training."""
    states, weight, labels = inputs
    total = system(states, weight, labels)
    return total.detach(), *torch.autograd.grad(total / len(labels), (states, weight))
