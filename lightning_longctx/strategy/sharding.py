"""How parameters start equal on all ranks, and how they are then distributed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_longctx._upstream import replicate

ShardingName = Literal["replicate", "fsdp"]


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give storage and initial values to parts that were built on the meta device.

    Raises:
        ValueError: A part has no ``reset_parameters``, so that nothing says what its values are.
    """
    parts = [part for part in module.modules() if any(tensor.is_meta for tensor in _own_tensors(part))]
    if helpless := sorted({type(part).__name__ for part in parts if not hasattr(part, "reset_parameters")}):
        raise ValueError(
            f"{', '.join(helpless)}: built on the meta device, but without a method reset_parameters() that says what "
            "the values are. Add one (it must fill parameters and buffers), or build the module on a real device."
        )
    ties = _tied_parameters(module)
    for part in parts:
        part.to_empty(device=device, recurse=False)
        cast("Any", part).reset_parameters()
    for (part, name), (owner, owned) in ties:
        setattr(part, name, getattr(owner, owned))


@torch.no_grad()
def copy_from_first_rank(module: nn.Module) -> None:
    """Overwrite parameters and buffers with rank 0's: replicas then start bit-equal, however the ranks were seeded."""
    for tensor in chain(module.parameters(), module.buffers()):
        sent = tensor.detach().contiguous()
        dist.broadcast(sent.view(torch.uint8) if sent.dtype == torch.bool else sent, src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


def distribute(module: nn.Module, mesh: DeviceMesh, sharding: ShardingName) -> None:
    """Turn parameters into DTensors over ``mesh``, whose gradients are averaged over it.

    ``fsdp`` (FSDP2, as in TorchTitan, arXiv 2410.06511) keeps a slice of every parameter on each rank and gathers a
    block when it runs. ``replicate`` keeps them whole. Both go the same way for any number of ranks, so that one
    process and many write the same checkpoints.
    """
    apply = fully_shard if sharding == "fsdp" else replicate
    low = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in module.parameters())
    # Weights may be narrow; a sum over ranks and micro-batches should not be.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    for part in (*repeated_blocks(module), module):
        apply(part, mesh=mesh, mp_policy=policy)
    # The root's outputs are logits and losses, often views, which nobody changes in place.
    message = rf"FSDP2-wrapped module \({type(module).__name__}\) returned a view tensor"
    warnings.filterwarnings("ignore", message=message)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Parts worth distributing by themselves: layers of a stack, so that one travels while another computes.

    They are the members of an ``nn.ModuleList`` that has at least two, all of one class; outermost lists count.
    A block that shares parameters with the rest of the module stays with the rest.
    """
    blocks = list(dict.fromkeys(_find_blocks(module)))
    owners = Counter(id(parameter) for part in module.modules() for parameter in _own_parameters(part))
    return [block for block in blocks if not _shares(block, owners)]


def reshard(module: nn.Module) -> None:
    """Make ``module.parameters()`` the distributed ones again: after a forward without backward they are not."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child) if isinstance(child, nn.ModuleList) else []
        containers = any(isinstance(member, nn.ModuleList | nn.ModuleDict) for member in members)  # cannot be called
        if len(members) > 1 and len(set(map(type, members))) == 1 and not containers:
            yield from members
        else:
            yield from _find_blocks(child)


def _shares(block: nn.Module, owners: Counter[int]) -> bool:
    inside = Counter(id(parameter) for part in block.modules() for parameter in _own_parameters(part))
    return any(owners[parameter] > count for parameter, count in inside.items())


def _own_parameters(part: nn.Module) -> list[nn.Parameter]:
    return list(part.parameters(recurse=False))


def _own_tensors(part: nn.Module) -> Iterator[Tensor]:
    return chain(part.parameters(recurse=False), part.buffers(recurse=False))


Place = tuple[nn.Module, str]


def _tied_parameters(module: nn.Module) -> list[tuple[Place, Place]]:
    """Places of a parameter beyond its first, each with the first: ``to_empty`` takes them apart."""
    first: dict[int, Place] = {}
    ties = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            place = (part, name)
            owner = first.setdefault(id(parameter), place)
            if owner is not place and owner != place:
                ties.append((place, cast("Place", owner)))
    return ties
