"""Attention of PyTorch and other packages below autograd, and what recognises it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import _native_multi_head_attention, _transformer_encoder_layer_fwd

if TYPE_CHECKING:
    from torch import Tensor

FUSED_ATTENTION = (_native_multi_head_attention, _transformer_encoder_layer_fwd)
"""What PyTorch's own transformer layers call in evaluation, around ``F.scaled_dot_product_attention``."""

flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention_cuda = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


CAST = torch.ops.aten._to_copy.default
"""What a change of dtype becomes."""

PLAIN_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)
"""What ``F.scaled_dot_product_attention`` becomes where it is one operation."""


def argument(op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation gets for an argument, or its default."""
    if name in kwargs:
        return kwargs[name]
    place = next(place for place, one in enumerate(op._schema.arguments) if one.name == name)
    return args[place] if place < len(args) else op._schema.arguments[place].default_value


def varlen_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """PyTorch's attention over packed sequences, forward and (private) backward."""
    return import_module("torch.nn.attention.varlen").varlen_attn, torch.ops.torch_attn._varlen_attn_backward


def flash_attn_2() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward over packed sequences of the package flash-attn, below autograd."""
    module = import_module("flash_attn.flash_attn_interface")
    return module._flash_attn_varlen_forward, module._flash_attn_varlen_backward


def flash_attn_4() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The same of the package flash-attn-4."""
    module = import_module("flash_attn.cute.interface")
    return module._flash_attn_fwd, module._flash_attn_bwd


class ContextParallelRing(NamedTuple):
    """What is behind ``torch.distributed.tensor.experimental.context_parallel``; takes the operation for a block."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


def context_parallel_ring(method: str, balanced: bool) -> ContextParallelRing:
    """PyTorch's own ring attention, set to rotate by ``allgather`` or ``alltoall``, over zigzag shards or contiguous.

    The settings are PyTorch's, of the whole process: ask again before every call.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as internals

    internals.set_rotate_method(method)
    internals._cp_options.enable_load_balance = balanced
    return ContextParallelRing(internals._templated_ring_attention, internals._templated_ring_attention_backward)


def fill_function_tables() -> None:
    """Let PyTorch and its compiler list their functions now: they do it once, and would list what stands in for one."""
    torch.overrides.get_overridable_functions()
    torch.overrides.get_testing_overrides()
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.get_torch_obj_rule_map()


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread: what is called then is recomputed."""
    return torch._C._current_graph_task_id() != -1
