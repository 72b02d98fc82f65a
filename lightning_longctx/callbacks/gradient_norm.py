"""Global gradient norm, before clipping."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_longctx._upstream import writes_metrics
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.gradients.norms import gradient_norm, parameters_of


class GradientNorm(Callback):
    """Log ``grad_norm``: the 2-norm of all gradients of the optimizer step, before clipping.

    One number for the whole model, the same on every rank, whether parameters are replicated or sharded. It is
    NaN in a step that the strategy skips, for no gradient is left then.
    """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not writes_metrics(trainer):
            return
        parameters = parameters_of(optimizer)
        left = any(parameter.grad is not None for parameter in parameters)
        norm = _norm(trainer, optimizer, parameters) if left else float("nan")
        pl_module.log("grad_norm", norm, on_step=True, on_epoch=False, batch_size=1)


def _norm(trainer: Trainer, optimizer: Optimizer, parameters: list[Tensor]) -> Tensor | float:
    """The strategy has measured it before the step, or another one has not."""
    if isinstance(trainer.strategy, LongContextStrategy):
        return trainer.strategy.gradient_norm(optimizer)
    return gradient_norm(parameters)
