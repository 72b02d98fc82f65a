"""Norm and clipping of gradients that live on several meshes: sharded, replicated, cut by tensor ranks, or plain.

Tensors of unlike meshes cannot enter one operation, so everything here is done on the parts that ranks hold. A part of
which there are ``c`` copies in the run counts ``1/c`` on each rank that has one; the sum over all ranks then counts
every element once, in one small message for all meshes together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_longctx._upstream import multiply, norms_of

NONE = -1.0
"""Stands in a message for no parameter."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, in its order: the same on all ranks."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """2-norm of the gradients of ``parameters``, a scalar, the same on every rank.

    A collective over all ranks if a parameter is distributed.
    """
    given = list(parameters)
    norm = gather_rows(measure(given), given)[:, 0].sum().sqrt()
    wide = [torch.promote_types(parameter.dtype, torch.float32) for parameter in given if parameter.grad is not None]
    return norm.to(max(wide, key=lambda dtype: dtype.itemsize, default=torch.float32))


def measure(parameters: Sequence[Tensor]) -> Tensor:
    """This rank's share in the norm, and in its faults. No communication.

    Args:
        parameters: In the same order on all ranks.

    Returns:
        Two float64 numbers: the share in the squared norm, and the index of the first parameter whose gradient, as far
        as this rank holds it, is not finite (or too large for its norm to be); ``NONE`` if there is none.
    """
    num_ranks = dist.get_world_size() if _distributed(parameters) else 1
    groups: dict[tuple[float, torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            part, copies = own_part(parameter.grad, num_ranks)
            groups[copies, part.device, part.dtype].append((index, part))
    device = message_device(parameters)
    share = torch.zeros((), dtype=torch.float64, device=device)
    first = torch.full((), float("inf"), dtype=torch.float64, device=device)
    for (copies, _, dtype), members in groups.items():
        norms = norms_of([part for _, part in members], torch.promote_types(dtype, torch.float32))
        stacked = torch.stack(norms).to(device, torch.float64)
        indices = torch.tensor([index for index, _ in members], dtype=torch.float64, device=device)
        share = share + stacked.square().sum() / copies
        first = torch.minimum(first, indices.where(~stacked.isfinite(), float("inf")).min())
    return torch.stack([share, first.where(first.isfinite(), NONE)])


def gather_rows(row: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The rows of all ranks, ``[num_ranks, n]``; this one's alone if no parameter is distributed."""
    if not _distributed(parameters):
        return row[None]
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def own_part(gradient: Tensor, num_ranks: int) -> tuple[Tensor, float]:
    """The part of a gradient that this rank holds, and how many ranks of the run hold that part.

    Args:
        gradient: A DTensor of any mesh, or a plain tensor, which is taken to be the same on all ranks.
        num_ranks: Ranks of the run.

    Raises:
        ValueError: Ranks hold summands, not parts.
    """
    if not isinstance(gradient, DTensor):
        return gradient, num_ranks
    parts = 1
    for dim, placement in enumerate(gradient.placements):
        if placement.is_partial():
            raise ValueError(
                f"a gradient is placed {gradient.placements}: its sum over ranks is still to be taken. Redistribute it "
                "before it is measured or clipped."
            )
        parts *= 1 if placement.is_replicate() else gradient.device_mesh.size(dim)
    return gradient.to_local(), num_ranks / parts


def message_device(parameters: Sequence[Tensor]) -> torch.device:
    """Where ranks exchange numbers: under ``cpu_offload`` it is not where gradients are."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            return parameter.device if parameter.device.type == kind else torch.device(kind)
    return parameters[0].device if parameters else torch.device("cpu")


@torch.no_grad()
def clip_by_norm(parameters: Iterable[Tensor], max_norm: float, norm: float) -> None:
    """Scale gradients as ``torch.nn.utils.clip_grad_norm_`` does, of which ``norm`` is the norm of all."""
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # so that a norm of NaN spreads, as it does in PyTorch
        for parts in _parts(parameters):
            multiply(parts, factor)


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp gradients to +-``clip_value``, as ``torch.nn.utils.clip_grad_value_`` does."""
    for parts in _parts(parameters):
        for part in parts:
            part.clamp_(min=-clip_value, max=clip_value)


def whole(tensor: Tensor) -> Tensor:
    """The full value of a tensor that may be sharded. A collective over its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _distributed(parameters: Sequence[Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for parameter in parameters for tensor in (parameter, parameter.grad))


def _parts(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            part, _ = own_part(parameter.grad, 1)
            groups[part.device, part.dtype].append(part)
    return groups.values()
