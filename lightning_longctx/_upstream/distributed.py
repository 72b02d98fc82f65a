"""Meshes, process groups, FSDP2 and tensors of many ranks in PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


def flatten_mesh(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """One-dimensional mesh over several axes. Keep it: looking it up by name in the root mesh is deprecated."""
    return mesh[axes]._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The same ranks of a one-dimensional mesh in several axes, slowest first."""
    return mesh._unflatten(0, sizes, names)


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """2-norm of each tensor, computed in ``dtype``; tensors of one device and one dtype."""
    return list(torch._foreach_norm(tensors, 2.0, dtype=dtype))


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors of one device and one dtype in place."""
    torch._foreach_mul_(tensors, factor)


def version_of(tensor: Tensor) -> int:
    """Grows whenever a tensor is written to."""
    return tensor._version


def allocator_settings() -> str | None:
    """What PyTorch's allocators have read from the environment; none where it cannot be asked."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return None if ask is None else ask()


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether ``register_hook`` was called on a tensor, and not undone."""
    return bool(tensor._backward_hooks)


def default_store() -> Store:
    """The store in which the world has met."""
    return import_module("torch.distributed.distributed_c10d")._get_default_store()


def bound_waits(timeout: timedelta) -> None:
    """Give every process group of this process that timeout; meshes make theirs with the backend's default."""
    c10d = import_module("torch.distributed.distributed_c10d")
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def is_open(group: ProcessGroup) -> bool:
    """Whether a process group was not destroyed yet."""
    return group in import_module("torch.distributed.distributed_c10d")._world.pg_map


def waited_group(holder: Any) -> ProcessGroup | None:
    """The process group that an object of FSDP2 talks over."""
    return getattr(holder, "_all_gather_process_group", None) if type(holder).__name__ == "FSDPParamGroup" else None


def announced(module: nn.Module, loss: Tensor) -> Tensor:
    """Tell FSDP2 that a backward through ``loss`` begins at the root.

    It learns that from outputs of the root's forward, which a loss of ``manual_backward`` is not: parameters that an
    earlier backward has freed would not be gathered, and gradients not be reduced.
    """
    return cast("FSDPModule", module)._get_fsdp_state()._register_pre_backward_hook(loss)


def sharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that optimizers hold, also while FSDP2 has gathered ones in their places."""
    return [parameter.sharded_param for group in _groups(module) for parameter in group.fsdp_params]


def reduce_unused_parameters(module: nn.Module, unused: set[int]) -> None:
    """Let every rank send a gradient for every parameter of what it ran, of zeros for those that it did not use.

    FSDP2 sends what there is, and ranks that use other parameters of a module would add up unlike ones.

    Args:
        module: Distributed by FSDP2.
        unused: Gets the ids of parameters whose gradient consists of such zeros alone, and loses those of others.
    """
    for group in _groups(module):
        group.post_backward = _filling(group, unused)


def _filling(group: Any, unused: set[int]) -> Callable[..., None]:
    post_backward = group.post_backward

    def fill_and_reduce(*args: Any) -> None:
        # Not if the group has not run at all: then its turn to communicate differs from that on other ranks, too.
        for parameter in group.fsdp_params if group.reduce_grads and group.is_unsharded else ():
            whole, own = parameter.unsharded_param, parameter.sharded_param
            if not whole.requires_grad:
                continue
            if whole.grad is not None or parameter.unsharded_accumulated_grad is not None:
                unused.discard(id(own))
                continue
            whole.grad = torch.zeros_like(whole)
            if own.grad is None:
                unused.add(id(own))
        post_backward(*args)

    return fill_and_reduce


def discard_unsynced_gradients(module: nn.Module) -> None:
    """Forget gradients that micro-batches left without a synchronising backward; ``zero_grad`` cannot see them."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter.unsharded_param.grad = None


def _groups(module: nn.Module) -> Iterator[Any]:
    """What FSDP2 gathers and reduces at a time."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield from part._get_fsdp_state()._fsdp_param_groups


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module go to what ``torch.compile`` made."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def allow_gathering_in_turns() -> None:
    """Do not warn that parameters cut twice (FSDP2 over tensor ranks) are gathered in two turns: there is no other way.

    It happens where whole values are asked for, in one-file checkpoints, not in steps.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def pipeline_tensor_parallel() -> None:
    """Let inductor interleave products with the collectives around them ("async tensor parallelism")."""
    setattr(import_module("torch._inductor.config"), "_micro_pipeline_tp", True)  # noqa: B010  unknown to type checkers


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without autograd, when a collective that it comes from has delivered it.

    Of another tensor, itself.
    """
    part = getattr(tensor, "_local_tensor", tensor)
    wait = getattr(part, "trigger_wait", None)
    return part if wait is None else wait()


def tensor_around(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Makes of this rank's part of a tensor like this one the whole; of a plain tensor there is nothing to make."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return lambda part: part
    spec = tensor._spec
    return lambda part: DTensor(part, spec, requires_grad=False)  # type: ignore[call-arg]


def shares_version(tensor: Tensor) -> Tensor:
    """The tensor without its history, as ``detach``; what changes one in place counts as a change of both.

    Within a ``TorchDispatchMode``, where ``detach`` alone would begin to count anew.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def profiler_is_on() -> bool:
    """Whether PyTorch's profiler is recording in this process."""
    return torch.autograd._profiler_enabled()
