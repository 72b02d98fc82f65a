"""Every private name of other packages that this one leans on, so that an upgrade has one place to look at."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_longctx._upstream.attention import (
    CAST,
    FUSED_ATTENTION,
    PLAIN_ATTENTION,
    ContextParallelRing,
    argument,
    context_parallel_ring,
    fill_function_tables,
    flash_attention_cpu,
    flash_attention_cpu_backward,
    flash_attention_cuda,
    flash_attention_cuda_backward,
    flash_attn_2,
    flash_attn_4,
    in_backward,
    varlen_attention,
)
from lightning_longctx._upstream.distributed import (
    allocator_settings,
    allow_gathering_in_turns,
    announced,
    bound_waits,
    default_store,
    discard_unsynced_gradients,
    flatten_mesh,
    has_gradient_hooks,
    is_compiled,
    is_open,
    local_part,
    multiply,
    norms_of,
    pipeline_tensor_parallel,
    profiler_is_on,
    reduce_unused_parameters,
    sharded_parameters,
    shares_version,
    tensor_around,
    unflatten_mesh,
    version_of,
    waited_group,
)
from lightning_longctx._upstream.lightning import (
    attached_trainer,
    before_each_batch,
    continue_epoch,
    current_dataloader,
    epoch_means,
    hands_out_samplers,
    hpc_save_path,
    is_first_of_window,
    is_last_of_window,
    log_before_step,
    logged_steps,
    mark_terminated,
    never_in_inference_mode,
    plateau_monitors,
    plateaus_are_due,
    set_callback_metrics,
    skip_plateaus,
    step_plateaus,
    take_signals,
    through_forward,
    train_counters,
    train_loaders,
    validation_is_due,
    watched_launcher,
    writes_metrics,
)
from lightning_longctx._upstream.litdata import (
    is_litdata,
    is_litdata_collate,
    is_litdata_dataset,
    litdata_place,
    place_litdata,
)
from lightning_longctx._upstream.transformers import (
    attention_of,
    keeps_a_state,
    set_attention,
)

if TYPE_CHECKING:
    from lightning.fabric.strategies.model_parallel import _FSDPNoSync as no_gradient_sync
    from lightning.fabric.strategies.model_parallel import _is_sharded_checkpoint as is_sharded_checkpoint
    from lightning.fabric.utilities.load import _METADATA_FILENAME as METADATA_FILENAME
    from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
    from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
    from torch.distributed._composable.replicate_with_fsdp import replicate

__all__ = [
    "CAST",
    "ContextParallelRing",
    "FUSED_ATTENTION",
    "METADATA_FILENAME",
    "OpOverload",
    "PLAIN_ATTENTION",
    "argument",
    "TorchDispatchMode",
    "composable_checkpoint",
    "local_part",
    "shares_version",
    "tensor_around",
    "tree_leaves",
    "tree_map_only",
    "allocator_settings",
    "allow_gathering_in_turns",
    "announced",
    "attached_trainer",
    "attention_of",
    "before_each_batch",
    "bound_waits",
    "collect_rng_states",
    "context_parallel_ring",
    "continue_epoch",
    "validation_is_due",
    "plateaus_are_due",
    "plateau_monitors",
    "step_plateaus",
    "skip_plateaus",
    "epoch_means",
    "set_callback_metrics",
    "current_dataloader",
    "default_store",
    "discard_unsynced_gradients",
    "fill_function_tables",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "flash_attention_cuda",
    "flash_attention_cuda_backward",
    "flash_attn_2",
    "flash_attn_4",
    "flatten_mesh",
    "hands_out_samplers",
    "has_gradient_hooks",
    "hpc_save_path",
    "in_backward",
    "is_compiled",
    "is_fake",
    "is_first_of_window",
    "is_last_of_window",
    "is_litdata",
    "is_litdata_collate",
    "is_litdata_dataset",
    "is_open",
    "is_sharded_checkpoint",
    "keeps_a_state",
    "litdata_place",
    "log_before_step",
    "logged_steps",
    "mark_terminated",
    "multiply",
    "never_in_inference_mode",
    "no_gradient_sync",
    "norms_of",
    "optimizers_to_device",
    "pipeline_tensor_parallel",
    "profiler_is_on",
    "reduce_unused_parameters",
    "sharded_parameters",
    "place_litdata",
    "replicate",
    "set_attention",
    "set_rng_states",
    "take_signals",
    "through_forward",
    "train_counters",
    "train_loaders",
    "unflatten_mesh",
    "varlen_attention",
    "version_of",
    "waited_group",
    "watched_launcher",
    "writes_metrics",
]

# Loaded when first asked for: attention needs none of them, and Lightning takes longer to import than torch.
_LATER = {
    "METADATA_FILENAME": "lightning.fabric.utilities.load:_METADATA_FILENAME",
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
