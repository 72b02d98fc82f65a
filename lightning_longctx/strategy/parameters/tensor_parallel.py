"""Cuts the matrices of a module over tensor ranks, as its plan says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_longctx._upstream import allow_gathering_in_turns, is_compiled, pipeline_tensor_parallel
from lightning_longctx.models.hugging_face.tensor_plan import hugging_face_plans
from lightning_longctx.models.tensor_plan import TensorPlan
from lightning_longctx.strategy.parameters.ties import tie_again, tied_parameters


def tensor_plan(module: nn.Module, num_ranks: int) -> TensorPlan:
    """How tensor ranks share a module: what its ``tensor_parallel_plan`` says, or the Hugging Face models in it carry.

    Args:
        module: Built, not yet distributed.
        num_ranks: Tensor ranks; one needs no plan, and gets an empty one.

    Raises:
        ValueError: There is no plan, or it does not fit the module.
    """
    if num_ranks == 1:
        return {}
    declare = getattr(module, "tensor_parallel_plan", None)
    plan: TensorPlan = hugging_face_plans(module) if declare is None else declare()
    if not plan:
        raise ValueError(
            f"tensor={num_ranks}, but {type(module).__name__} does not say how tensor ranks share its matrices. Define "
            "tensor_parallel_plan (see lightning_longctx.mixins.LongContextMixin), or train with tensor=1."
        )
    for name, style in plan.items():
        _check_entry(module, name, style)
        _check_sizes(module, name, style, num_ranks)
    return plan


def tensor_parallelise(module: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Cut matrices in place, and let their modules gather tokens and scatter sums. No communication.

    Args:
        module: Its parameters must be equal on all tensor ranks.
        mesh: The tensor ranks, one-dimensional.
        plan: From ``tensor_plan``.

    Raises:
        ValueError: A parameter has two names, of which the plan cuts only one, or each in another way.
    """
    if mesh.size() == 1:
        return
    allow_gathering_in_turns()
    ties = tied_parameters(module)
    frozen = {name for name, weight in module.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    for pattern, style in plan.items():
        for name in _matching(module, pattern):
            if isinstance(style, Shard):
                _cut_parameter(module, name, mesh, style)
            else:
                parallelize_module(module.get_submodule(name), mesh, style, src_data_rank=None)
    tie_again(ties)
    for name, weight in module.named_parameters(remove_duplicate=False):
        weight.requires_grad_(name not in frozen)


def check_overlap(wanted: bool, num_ranks: int) -> None:
    """Raise ``ValueError`` if tensor ranks are to communicate while they multiply, and there is one."""
    if wanted and num_ranks == 1:
        raise ValueError("async_tensor_parallel=true needs tensor ranks: set degrees.tensor above 1, or leave it out.")


def overlap(module: nn.Module, device: torch.device) -> None:
    """Let the compiler interleave products with the communication around them, in the whole process.

    Args:
        module: Must have compiled parts: only these communicate so.
        device: Must be of CUDA.

    Raises:
        ValueError: It is not, or nothing is compiled.
    """
    if device.type != "cuda":
        raise ValueError(f"async_tensor_parallel=true needs CUDA, but this run is on {device.type}. Leave it out.")
    if not any(is_compiled(part) for part in module.modules()):
        raise ValueError(
            f"async_tensor_parallel=true, but no part of {type(module).__name__} is compiled. Compile its layers in "
            "configure_model (layer.compile()), or leave it out."
        )
    pipeline_tensor_parallel()


def _check_entry(module: nn.Module, name: str, style: Any) -> None:
    kind = type(module).__name__
    if not isinstance(style, ParallelStyle | Shard):
        raise ValueError(
            f"the tensor plan of {kind} has {style!r} for {name!r}: it must be a style of "
            "torch.distributed.tensor.parallel, or Shard(dim) for a parameter."
        )
    found = list(_matching(module, name))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    known = parameters if isinstance(style, Shard) else dict(module.named_modules(remove_duplicate=False))
    what = "parameter" if isinstance(style, Shard) else "submodule"
    if not found or any(one not in known for one in found):
        raise ValueError(
            f"the tensor plan of {kind} names {name!r}, but no {what} is called so. Correct the name; * stands for one "
            "part of it."
        )


def _check_sizes(module: nn.Module, pattern: str, style: Any, num_ranks: int) -> None:
    """What arrives in parts must be in even ones: nothing tells PyTorch how long the parts of other ranks are."""
    for name in _matching(module, pattern) if isinstance(style, ColwiseParallel | RowwiseParallel) else ():
        part = module.get_submodule(name)
        if not isinstance(part, nn.Linear | nn.Embedding):
            raise ValueError(
                f"tensor={num_ranks}: the plan cuts {name}, a {type(part).__name__}, but {type(style).__name__} is for "
                "nn.Linear and nn.Embedding. Name the matrix inside it in tensor_parallel_plan, or train with tensor=1."
            )
        size = _cut_size(part, style)
        if size is not None and -(-size // num_ranks) * (num_ranks - 1) >= size:
            raise ValueError(
                f"tensor={num_ranks} leaves a rank without a part of the {size} rows of {name}. Use fewer "
                "tensor ranks, or a larger size (of a vocabulary: pad it)."
            )
    if not isinstance(style, RowwiseParallel) or style.input_layouts != (Shard(-1),):
        return
    for name in _matching(module, pattern):
        part = module.get_submodule(name)
        if isinstance(part, nn.Linear) and part.in_features % num_ranks:
            raise ValueError(
                f"tensor={num_ranks} does not divide the {part.in_features} inputs of {name}, which tensor ranks "
                "share: choose a width that it divides (of an MLP or of all heads), or another degree."
            )


def _cut_size(part: nn.Module, style: Any) -> int | None:
    """What tensor ranks share of an embedding's rows or a matrix's outputs; None for inputs, which must be even."""
    if isinstance(part, nn.Embedding) and isinstance(style, RowwiseParallel):
        return part.num_embeddings
    return part.out_features if isinstance(part, nn.Linear) and isinstance(style, ColwiseParallel) else None


def _matching(module: nn.Module, pattern: str) -> Iterator[str]:
    """Names of submodules and parameters that a plan's entry means."""
    fits = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*"))).fullmatch
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    names += [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return (name for name in names if fits(name))


def _cut_parameter(module: nn.Module, name: str, mesh: DeviceMesh, shard: Shard) -> None:
    owner, _, own_name = name.rpartition(".")
    part = module.get_submodule(owner)
    whole = part.get_parameter(own_name)
    if isinstance(whole, DTensor):
        raise ValueError(f"the tensor plan cuts the parameter {name} twice. Name it once.")
    cut = distribute_tensor(whole.detach(), mesh, [shard], src_data_rank=None)
    part.register_parameter(own_name, nn.Parameter(cast("torch.Tensor", cut)))
