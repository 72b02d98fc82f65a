"""Global gradient norm, before clipping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_longctx._upstream import writes_metrics


class GradientNorm(Callback):
    """Log ``grad_norm``: the 2-norm of all gradients of the optimizer step, before clipping.

    One number for the whole model, the same on every rank, whether parameters are replicated or sharded.
    """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if writes_metrics(trainer):
            norm = gradient_norm(parameter for group in optimizer.param_groups for parameter in group["params"])
            pl_module.log("grad_norm", norm, on_step=True, on_epoch=False, batch_size=1)


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """2-norm of the gradients of ``parameters``, a scalar. Collective over the meshes of sharded gradients.

    Gradients on different meshes cannot enter one operation, so each mesh gives its own norm; a mesh counts an element
    once, however many of its ranks hold a copy.
    """
    by_mesh = defaultdict(list)
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [whole(torch.nn.utils.get_total_norm(gradients)) for gradients in by_mesh.values()]
    return torch.stack(norms).norm() if norms else torch.zeros(())


def whole(tensor: Tensor) -> Tensor:
    """The full value of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
