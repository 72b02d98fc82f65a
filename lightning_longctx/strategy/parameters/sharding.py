"""How parameters start equal on all ranks, and how they are then distributed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_longctx._upstream import replicate
from lightning_longctx.memory.blocks import repeated_blocks
from lightning_longctx.strategy.parameters.sharding_options import ShardingName, ShardingOptions
from lightning_longctx.strategy.parameters.ties import tie_again, tied_parameters

__all__ = ["ShardingName", "copy_from_first_rank", "distribute", "materialise", "repeated_blocks", "reshard"]


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
    ties = tied_parameters(module)
    for part in parts:
        part.to_empty(device=device, recurse=False)
        cast("Any", part).reset_parameters()
    tie_again(ties)


@torch.no_grad()
def copy_from_first_rank(module: nn.Module) -> None:
    """Overwrite parameters and buffers with rank 0's: replicas then start bit-equal, however the ranks were seeded."""
    for tensor in chain(module.parameters(), module.buffers()):
        sent = tensor.detach().contiguous()
        dist.broadcast(sent.view(torch.uint8) if sent.dtype == torch.bool else sent, src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


def distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    sharding: ShardingName,
    options: ShardingOptions = ShardingOptions(),  # noqa: B008
) -> None:
    """Turn parameters into DTensors over ``mesh``, whose gradients are averaged over it.

    ``fsdp`` (FSDP2, as in TorchTitan, arXiv 2410.06511) keeps a slice of every parameter on each rank and gathers a
    block when it runs. ``replicate`` keeps them whole. ``hsdp`` shards over the last axis of ``mesh`` and replicates
    over the first. All go the same way for any number of ranks, so that one process and many write the same
    checkpoints.

    Args:
        module: Its parameters may be DTensors over tensor ranks already.
        mesh: One axis; under ``hsdp`` two, replicate x shard.
        sharding: How.
        options: What goes with ``fsdp`` and ``hsdp``.

    Raises:
        ValueError: Parameters that are reduced together have unlike dtypes.
    """
    apply: Any = replicate
    if sharding != "replicate":
        # None is FSDP2's own choice: blocks are freed, the root is not, for its backward begins at once.
        reshard_after_forward = None if options.reshard_after_forward else False
        offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
        apply = partial(fully_shard, reshard_after_forward=reshard_after_forward, offload_policy=offload)
    parts = [*repeated_blocks(module), module]
    check_dtypes(module, parts)
    policy = precision_policy({parameter.dtype for parameter in module.parameters()})
    for part in parts:
        apply(part, mesh=mesh, mp_policy=policy)
    # The root's outputs are logits and losses, often views, which nobody changes in place.
    message = rf"FSDP2-wrapped module \({type(module).__name__}\) returned a view tensor"
    warnings.filterwarnings("ignore", message=message)


def precision_policy(dtypes: set[torch.dtype]) -> MixedPrecisionPolicy:
    """FSDP2's part in mixed precision: it casts nothing, and adds gradients of narrow weights in float32.

    The Trainer's ``precision`` decides the rest, and is what one process computes with too: under ``32-true`` and
    ``bf16-mixed`` weights are float32 and autocast chooses what runs in bfloat16, so gradients are float32 as well;
    under ``bf16-true`` weights and gradients are bfloat16. Casting by FSDP2 would be another arithmetic (it also casts
    inputs of blocks, such as rotary tables).

    Args:
        dtypes: Of all parameters, after the Trainer's conversion.
    """
    # Weights may be narrow; a sum over ranks and micro-batches should not be.
    low = not dtypes.isdisjoint((torch.bfloat16, torch.float16))
    return MixedPrecisionPolicy(reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()


def check_dtypes(module: nn.Module, parts: list[nn.Module]) -> None:
    """Check that gradients which travel in one message have one dtype.

    Args:
        module: The root.
        parts: What is distributed by itself; the root last.

    Raises:
        ValueError: They have several; the message names two parameters.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    taken: set[int] = set()
    for part in parts:
        seen: dict[torch.dtype, str] = {}
        for parameter in part.parameters():
            if parameter.requires_grad and id(parameter) not in taken:
                seen.setdefault(parameter.dtype, names[id(parameter)])
            taken.add(id(parameter))
        if len(seen) > 1:
            (dtype, name), (other_dtype, other) = list(seen.items())[:2]
            raise ValueError(
                f"parameter {name} is {dtype} and {other} is {other_dtype}, but FSDP2 reduces gradients of a block in "
                "one dtype. Give both the same, or freeze one (requires_grad=False)."
            )


def reshard(module: nn.Module) -> None:
    """Make ``module.parameters()`` the distributed ones again: after a forward without backward they are not."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _own_tensors(part: nn.Module) -> Iterator[Tensor]:
    return chain(part.parameters(recurse=False), part.buffers(recurse=False))
