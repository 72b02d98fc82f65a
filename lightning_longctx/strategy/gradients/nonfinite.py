"""Losses and gradients that are not finite: all ranks decide together, before the optimizer steps, and know why.

What one rank does wrong reaches the others in the reduction of gradients, so that none of them can tell where it came
from. Each rank therefore notes its own losses, and tells the others before the step, in one message with its share in
the gradient's norm, which clipping then uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_longctx._upstream import log_before_step, version_of
from lightning_longctx.strategy.gradients.copies import copied_norms, in_all, is_packed, packed, unlike
from lightning_longctx.strategy.gradients.norms import (
    NONE,
    clip_by_norm,
    clip_by_value,
    gather_rows,
    measure,
    parameters_of,
)

NonFiniteGradients = Literal["raise", "skip"]


@dataclass(frozen=True)
class Fault:
    """What was not finite in an optimizer step; the same value on every rank.

    Args:
        ranks: Whose loss was the first; or, if all losses are finite, who hold the part of the gradient.
        micro_batch: In which micro-batch of the window the loss was; None if all losses are finite.
        parameter: Index of the first parameter whose gradient is not finite; None if all are.
    """

    ranks: tuple[int, ...]
    micro_batch: int | None
    parameter: int | None

    def describe(self, step: int, names: Sequence[str]) -> str:
        """In words, for an optimizer step counted from 0 and parameters called ``names``."""
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        gradient = "" if self.parameter is None else f"the gradient of {names[self.parameter]}"
        if self.micro_batch is None:
            return f"optimizer step {step}: {gradient} is not finite, in the part that {who} holds"
        follows = f", and so is {gradient}" if gradient else ""
        return f"optimizer step {step}: the loss of {who} in micro-batch {self.micro_batch} is not finite{follows}"


def find_fault(rows: list[list[float]]) -> Fault | None:
    """What the ranks' messages say together.

    Args:
        rows: Of every rank its share in the squared norm, its first parameter with a fault, and the micro-batch of its
            first loss with one; ``NONE`` where there is none.
    """
    losses = [row[2] for row in rows if row[2] != NONE]
    gradients = [row[1] for row in rows if row[1] != NONE]
    parameter = int(min(gradients)) if gradients else None
    if losses:
        first = min(losses)
        return Fault(tuple(rank for rank, row in enumerate(rows) if row[2] == first), int(first), parameter)
    if parameter is not None:
        return Fault(tuple(rank for rank, row in enumerate(rows) if row[1] == parameter), None, parameter)
    return None


class GradientGuard:
    """Watches over the gradients of a run: are they finite, what is their norm, how are they clipped.

    Args:
        on_fault: Whether to ``raise``, or to ``skip`` the optimizer step.
    """

    def __init__(self, on_fault: NonFiniteGradients) -> None:
        if on_fault not in get_args(NonFiniteGradients):
            raise ValueError(f"nonfinite_gradients={on_fault!r} is unknown; choose raise or skip.")
        self.on_fault = on_fault
        self.num_skipped = 0
        self.num_tensor_ranks = 1
        self.unused: set[int] = set()  # parameters whose gradient is made up of zeros, on this rank
        self._first_loss: Tensor | None = None  # micro-batch of the first loss with a fault
        self._num_losses = 0
        self._unlike: int | None = None  # parameter of which tensor ranks hold unlike copies
        self._measured: tuple[list[tuple[Tensor, int]], float] | None = None

    def watch(self, loss: Tensor, *, first: bool) -> None:
        """Note whether a loss that is about to be differentiated is finite. Nothing waits for the device.

        Args:
            loss: As it is differentiated: that of a rank without tokens is 0 by now.
            first: Whether it starts a window, so that what was noted before is of no interest.
        """
        if first:
            self.forget()
        own = loss.detach()
        own = own.to_local() if isinstance(own, DTensor) else own
        before = self._first_loss
        if before is None:
            before = torch.full((), NONE, dtype=torch.float64, device=own.device)
        fault = ~own.isfinite().all() & (before == NONE)
        self._first_loss = before.masked_fill(fault, self._num_losses)
        self._num_losses += 1

    def forget(self) -> None:
        """Begin a new window."""
        self._first_loss, self._num_losses = None, 0

    def check(self, optimizer: Optimizer, module: LightningModule, step: int) -> None:
        """Decide whether the optimizer may step, on all ranks alike. A collective.

        Under ``skip`` a step with a fault loses its gradients: an optimizer leaves parameters without a gradient as
        they are, with their moments and step counts.

        Args:
            optimizer: About to step.
            module: Knows the names of its parameters.
            step: Number of the optimizer step.

        Raises:
            RuntimeError: Something is not finite, and the option is ``raise``. The same on every rank.
        """
        parameters = parameters_of(optimizer)
        fault = self._measure(parameters)
        self.forget()
        if fault is not None:
            self._handle(fault, parameters, module, step)
        elif self._unlike is not None:
            raise RuntimeError(
                f"optimizer step {step}: the gradients of {_names(parameters, module)[self._unlike]} differ between "
                f"tensor={self.num_tensor_ranks} ranks, which hold copies of it: it is used where each has a part of "
                "the states. Name it in tensor_parallel_plan (SequenceParallel() where tokens are split, "
                "models.tensor_plan.shared_by_heads() for a norm over heads), or use it where states are whole."
            )
        if self.on_fault == "skip":
            log_before_step(module, "skipped_steps", float(self.num_skipped))

    def release(self) -> None:
        """Let go of gradients: the step is over."""
        self._measured = None

    def norm(self, optimizer: Optimizer) -> float:
        """2-norm of all gradients of an optimizer: that which ``check`` has found, unless they were changed since.

        A collective in the latter case.
        """
        parameters = parameters_of(optimizer)
        if self._measured is None or not _untouched(self._measured[0], parameters):
            self._measure(parameters)
        assert self._measured is not None
        return self._measured[1]

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """In place of ``Precision.clip_grad_by_norm``: over all meshes, with the norm that ``check`` has found."""
        clip_by_norm(parameters_of(optimizer), clip_val, self.norm(optimizer))
        self._measured = None

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """In place of ``Precision.clip_grad_by_value``."""
        clip_by_value(parameters_of(optimizer), clip_val)

    def take_clipping(self, precision: Any) -> None:
        """Stand in for what a precision plugin inherits; one that clips in its own way keeps doing so."""
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            if getattr(type(precision), name) is getattr(Precision, name):
                setattr(precision, name, getattr(self, name))

    def _handle(self, fault: Fault, parameters: Sequence[Tensor], module: LightningModule, step: int) -> None:
        names = _names(parameters, module)
        if self.on_fault == "raise":
            raise RuntimeError(
                f"{fault.describe(step, names)}. Weights are those before the step. Lower the learning rate, or look "
                "at the batch; Trainer(detect_anomaly=True) finds the operation; the strategy's option "
                "nonfinite_gradients=skip leaves such steps out."
            )
        self.num_skipped += 1
        rank_zero_warn(f"{fault.describe(step, names)}. The step is skipped ({self.num_skipped} so far).")
        for parameter in parameters:
            parameter.grad = None

    def _measure(self, parameters: Sequence[Tensor]) -> Fault | None:
        own = measure(parameters)
        loss = own.new_full((1,), NONE) if self._first_loss is None else self._first_loss[None].to(own.device)
        copies = copied_norms(parameters).sum(0, keepdim=True) if self.num_tensor_ranks > 1 else own[:0]
        unused = own.new_tensor(packed([id(parameter) in self.unused for parameter in parameters]))
        rows: list[list[float]] = gather_rows(torch.cat([own, loss, copies, unused]), parameters).tolist()
        fault = find_fault([row[:3] for row in rows])
        self._unlike = None
        if fault is None and len(copies) and unlike([row[3] for row in rows], self.num_tensor_ranks):
            each = gather_rows(copied_norms(parameters), parameters).T.tolist()
            self._unlike = next((i for i, norms in enumerate(each) if unlike(norms, self.num_tensor_ranks)), None)
        self._drop_unused(parameters, [row[3 + len(copies) :] for row in rows])
        norm = math.sqrt(sum(row[0] for row in rows))
        self._measured = [(tensor, version_of(tensor)) for tensor in _gradients(parameters)], norm
        return fault

    def _drop_unused(self, parameters: Sequence[Tensor], words: list[list[float]]) -> None:
        """Leave parameters that no rank has used without a gradient, as in one process."""
        if any(nobody_uses := in_all(words)):
            for index, parameter in enumerate(parameters):
                if is_packed(nobody_uses, index):
                    parameter.grad = None
        self.unused.difference_update(map(id, parameters))


def _names(parameters: Sequence[Tensor], module: LightningModule) -> list[str]:
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    return [known.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(parameters)]


@torch.no_grad()
def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Everything that can be written to: DTensors, and their parts, for either does not notice what the other does."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return found + [gradient.to_local() for gradient in found if isinstance(gradient, DTensor)]


def _untouched(measured: list[tuple[Tensor, int]], parameters: Sequence[Tensor]) -> bool:
    """Whether gradients are still the tensors that were measured, and nobody has written to them."""
    now = [(tensor, version_of(tensor)) for tensor in _gradients(parameters)]
    same = (one is other and version == then for (one, version), (other, then) in zip(now, measured, strict=False))
    return len(now) == len(measured) and all(same)
