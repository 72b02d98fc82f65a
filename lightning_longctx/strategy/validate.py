"""Modules and optimizers that cannot be trained rightly are refused here."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_longctx.models.hugging_face.whole import check_models
from lightning_longctx.strategy.gradients.norms import parameters_of
from lightning_longctx.strategy.parameters.sharding_options import Distribution
from lightning_longctx.topology import Degrees

_DISTRIBUTION = "_longctx_distribution"


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
                "strategy with other degrees or another sharding. Build the module anew and leave parallelisation to "
                "the strategy."
            )


def remember(module: nn.Module, distribution: Distribution) -> None:
    """Note on a module how its parameters have been distributed."""
    vars(module)[_DISTRIBUTION] = distribution


def is_parallelised(module: nn.Module, distribution: Distribution) -> bool:
    """Whether a strategy has distributed the module in this very way before (fit, then validate, then fit)."""
    distributed = all(isinstance(parameter, DTensor) for parameter in module.parameters())
    return isinstance(module, FSDPModule) and distributed and vars(module).get(_DISTRIBUTION) == distribution


def check_optimizers(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Check that optimizers hold the parameters that the module has now.

    Distributing a module replaces its parameters. An optimizer made before that (LightningCLI's ``optimizer:`` key
    makes one) would train the old ones: no error, and weights that never change.

    Raises:
        ValueError: An optimizer holds another parameter, or has a group without any.
    """
    current = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if 0 in sizes:
            raise ValueError(
                f"{type(optimizer).__name__} has no parameters in group {sizes.index(0)} of {len(sizes)}: checkpoints "
                "keep what a group is by its parameters, and could not be resumed. In configure_optimizers leave out "
                'groups whose "params" are empty.'
            )
        held = parameters_of(optimizer)
        if stale := [parameter for parameter in held if id(parameter) not in current]:
            raise ValueError(
                f"{type(optimizer).__name__} holds {len(stale)} of {len(held)} parameters that are no longer the "
                "module's: it was made before parameters were distributed, and would train nothing. Make it in "
                "configure_optimizers; from the command line take it as an init argument of the model, "
                "`optimizer: OptimizerCallable` (LongContextMixin has it), not by LightningCLI's optimizer key."
            )
