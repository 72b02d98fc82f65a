"""Modules and optimizers that cannot be trained rightly are refused here."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_longctx.models.hugging_face.whole import check_models
from lightning_longctx.topology import Degrees


def check_module(module: nn.Module, degrees: Degrees) -> None:
    """Check that no part of a module has been parallelised by someone else, and that all of it can be distributed.

    Args:
        module: To be distributed.
        degrees: Over how many ranks; Hugging Face models in the module must be able to attend over them.

    Raises:
        ValueError: A part has or cannot; the message names it.
    """
    check_models(module, degrees)
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel | DistributedDataParallel):
            raise ValueError(
                f"{name or 'the module'} is wrapped in {type(part).__name__}, but the strategy distributes parameters "
                "itself. Leave the wrapper out, and set sharding to fsdp or replicate."
            )
        if isinstance(part, nn.SyncBatchNorm):
            raise ValueError(
                f"{name or 'the module'} is a SyncBatchNorm, which would mix statistics of different tokens of a "
                "sequence. Use a norm over features, such as RMSNorm or LayerNorm."
            )
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise ValueError(
                f"parameter {name} has no dims, and FSDP2 distributes parameters along their first one. Give it shape "
                "[1]: nn.Parameter(torch.ones(1))."
            )
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name} is a DTensor already: the module was parallelised in configure_model, or by a "
                "strategy with other degrees. Build the module anew and leave parallelisation to the strategy."
            )


def is_parallelised(module: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether a strategy with this very mesh has distributed the module before (fit, then validate, then fit)."""
    parameters = list(module.parameters())
    distributed = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    same = all(parameter.device_mesh == mesh for parameter in distributed)
    return isinstance(module, FSDPModule) and len(distributed) == len(parameters) and same


def check_optimizers(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Check that optimizers hold the parameters that the module has now.

    Distributing a module replaces its parameters. An optimizer made before that (LightningCLI's ``optimizer:`` key
    makes one) would train the old ones: no error, and weights that never change.

    Raises:
        ValueError: An optimizer holds another parameter.
    """
    current = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if stale := [parameter for parameter in held if id(parameter) not in current]:
            raise ValueError(
                f"{type(optimizer).__name__} holds {len(stale)} of {len(held)} parameters that are no longer the "
                "module's: it was made before parameters were distributed, and would train nothing. Make it in "
                "configure_optimizers; from the command line take it as an init argument of the model, "
                "`optimizer: OptimizerCallable` (LongContextMixin has it), not by LightningCLI's optimizer key."
            )
