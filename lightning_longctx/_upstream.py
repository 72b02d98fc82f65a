"""Every private name of other packages that this one leans on, so that an upgrade has one file to look at."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import _native_multi_head_attention, _transformer_encoder_layer_fwd
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from lightning.fabric.strategies.model_parallel import _FSDPNoSync as no_gradient_sync
    from lightning.fabric.strategies.model_parallel import _is_sharded_checkpoint as is_sharded_checkpoint
    from lightning.fabric.utilities.load import _METADATA_FILENAME as METADATA_FILENAME
    from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
    from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from torch import Tensor, nn
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

FUSED_ATTENTION = (_native_multi_head_attention, _transformer_encoder_layer_fwd)
"""What PyTorch's own transformer layers call in evaluation, around ``F.scaled_dot_product_attention``."""

flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention_cuda = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

__all__ = [
    "FUSED_ATTENTION",
    "METADATA_FILENAME",
    "SubprocessScriptLauncher",
    "TorchDispatchMode",
    "ContextParallelRing",
    "announced",
    "attention_of",
    "attached_trainer",
    "context_parallel_ring",
    "collect_rng_states",
    "current_dataloader",
    "discard_unsynced_gradients",
    "flash_attn_2",
    "flash_attn_4",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "flash_attention_cuda",
    "flash_attention_cuda_backward",
    "fill_function_tables",
    "flatten_mesh",
    "in_backward",
    "is_fake",
    "is_first_of_window",
    "is_last_of_window",
    "is_sharded_checkpoint",
    "keeps_a_state",
    "never_in_inference_mode",
    "no_gradient_sync",
    "optimizers_to_device",
    "replicate",
    "set_rng_states",
    "varlen_attention",
    "writes_metrics",
]


# Loaded when first asked for: attention needs none of them, and Lightning takes longer to import than torch.
_LATER = {
    "METADATA_FILENAME": "lightning.fabric.utilities.load:_METADATA_FILENAME",
    "SubprocessScriptLauncher": "lightning.pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher",
    "collect_rng_states": "lightning.fabric.utilities.seed:_collect_rng_states",
    "is_sharded_checkpoint": "lightning.fabric.strategies.model_parallel:_is_sharded_checkpoint",
    "no_gradient_sync": "lightning.fabric.strategies.model_parallel:_FSDPNoSync",
    "optimizers_to_device": "lightning.fabric.utilities.optimizer:_optimizers_to_device",
    "replicate": "torch.distributed._composable.replicate_with_fsdp:replicate",
    "set_rng_states": "lightning.fabric.utilities.seed:_set_rng_states",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, private = _LATER[name].partition(":")
    return getattr(import_module(module), private)


def flatten_mesh(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """One-dimensional mesh over several axes. Keep it: looking it up by name in the root mesh is deprecated."""
    return mesh[axes]._flatten(name)


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


def attached_trainer(module: LightningModule) -> Trainer | None:
    """The module's trainer, or none where ``module.trainer`` would raise."""
    return module._trainer


def is_first_of_window(trainer: Trainer) -> bool:
    """Whether the current micro-batch starts an accumulation window: Lightning zeroes gradients before its backward."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def is_last_of_window(trainer: Trainer) -> bool:
    """Whether an optimizer step follows the current micro-batch."""
    return not trainer.fit_loop._should_accumulate()


def writes_metrics(trainer: Trainer) -> bool:
    """Whether Lightning writes metrics after the current optimizer step: what is logged at others is never seen."""
    return trainer._logger_connector.should_update_logs


def current_dataloader(trainer: Trainer) -> int | None:
    """Index of the loader whose batch is being evaluated; none if there is only one."""
    return None if trainer._results is None else trainer._results.dataloader_idx


def never_in_inference_mode(trainer: Trainer) -> None:
    """Evaluate under ``no_grad``: tensors made in inference mode, as in the sanity check, cannot be trained on later.

    Lightning does so for its own FSDP strategy and for gloo.
    """
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in loops:
        loop.inference_mode = False


def fill_function_tables() -> None:
    """Let PyTorch and its compiler list their functions now: they do it once, and would list what stands in for one."""
    torch.overrides.get_overridable_functions()
    torch.overrides.get_testing_overrides()
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.get_torch_obj_rule_map()


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread: what is called then is recomputed."""
    return torch._C._current_graph_task_id() != -1


def attention_of(config: Any) -> str | None:
    """Which attention a Hugging Face configuration names."""
    return config._attn_implementation


def set_attention(config: Any, name: str | None) -> None:
    """Let it name another one; configurations inside it keep theirs."""
    config._attn_implementation_internal = name


def keeps_a_state(model: Any) -> bool:
    """Whether a Hugging Face model has a state that goes from token to token, as Mamba's does."""
    return model._is_stateful


def announced(module: nn.Module, loss: Tensor) -> Tensor:
    """Tell FSDP2 that a backward through ``loss`` begins at the root.

    It learns that from outputs of the root's forward, which a loss of ``manual_backward`` is not: parameters that an
    earlier backward has freed would not be gathered, and gradients not be reduced.
    """
    return cast("FSDPModule", module)._get_fsdp_state()._register_pre_backward_hook(loss)


def discard_unsynced_gradients(module: nn.Module) -> None:
    """Forget gradients that micro-batches left without a synchronising backward; ``zero_grad`` cannot see them."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        cast("Any", parameter).unsharded_param.grad = None
