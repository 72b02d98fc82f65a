"""Every private name of torch and Lightning that the package leans on, so that an upgrade has one file to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from lightning.fabric.strategies.model_parallel import _FSDPNoSync, _is_sharded_checkpoint
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import _native_multi_head_attention, _transformer_encoder_layer_fwd
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

METADATA_FILENAME: str = _METADATA_FILENAME
"""File of a sharded checkpoint that holds what is not sharded: loops, callbacks, schedulers."""

SubprocessScriptLauncher = _SubprocessScriptLauncher
"""Starts the further processes of a node as copies of the current command."""

FUSED_ATTENTION = (_native_multi_head_attention, _transformer_encoder_layer_fwd)
"""What PyTorch's own transformer layers call in evaluation, around ``F.scaled_dot_product_attention``."""

flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention_cuda = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

collect_rng_states = _collect_rng_states
is_sharded_checkpoint = _is_sharded_checkpoint
no_gradient_sync = _FSDPNoSync
optimizers_to_device = _optimizers_to_device
set_rng_states = _set_rng_states

__all__ = [
    "FUSED_ATTENTION",
    "METADATA_FILENAME",
    "SubprocessScriptLauncher",
    "TorchDispatchMode",
    "ContextParallelRing",
    "announced",
    "attached_trainer",
    "context_parallel_ring",
    "collect_rng_states",
    "current_dataloader",
    "discard_unsynced_gradients",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "flash_attention_cuda",
    "flash_attention_cuda_backward",
    "flatten_mesh",
    "is_first_of_window",
    "is_last_of_window",
    "is_sharded_checkpoint",
    "never_in_inference_mode",
    "no_gradient_sync",
    "optimizers_to_device",
    "replicate",
    "set_rng_states",
    "writes_metrics",
]


def flatten_mesh(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """One-dimensional mesh over several axes. Keep it: looking it up by name in the root mesh is deprecated."""
    return mesh[axes]._flatten(name)


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


def announced(module: nn.Module, loss: Tensor) -> Tensor:
    """Tell FSDP2 that a backward through ``loss`` begins at the root.

    It learns that from outputs of the root's forward, which a loss of ``manual_backward`` is not: parameters that an
    earlier backward has freed would not be gathered, and gradients not be reduced.
    """
    return cast("FSDPModule", module)._get_fsdp_state()._register_pre_backward_hook(loss)


def discard_unsynced_gradients(module: nn.Module) -> None:
    """Forget gradients that micro-batches left without a synchronising backward; ``zero_grad`` cannot see them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        cast("Any", parameter).unsharded_param.grad = None
