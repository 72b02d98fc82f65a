"""Options and helpers for a module of your own: an optimizer that can be configured, means that count tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from torch import Tensor, nn

from lightning_longctx._upstream import attached_trainer, current_dataloader, is_first_of_window, is_last_of_window
from lightning_longctx.loss import TokenMean
from lightning_longctx.models.hugging_face.tensor_plan import hugging_face_plans
from lightning_longctx.models.tensor_plan import TensorPlan
from lightning_longctx.plan.mask import Mask
from lightning_longctx.strategy import LongContextStrategy


class LongContextMixin:
    """Put it before ``LightningModule``: ``class Mine(LongContextMixin, LightningModule)``, and pass ``**kwargs`` up.

    Args:
        *args: For the next class.
        optimizer: Makes the optimizer from the module's parameters, such as ``torch.optim.AdamW``.
        lr_scheduler: Makes the learning rate's schedule from the optimizer; stepped once per optimizer step
            (``ReduceLROnPlateau`` once per epoch, with its monitor).
        **kwargs: For the next class.
    """

    def __init__(
        self,
        *args: Any,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._make_optimizer = optimizer
        self._make_lr_scheduler = lr_scheduler
        self._window_sums: dict[str, Tensor] = {}
        self._last_logged: dict[str, tuple[int, int]] = {}  # epoch and step
        self._epoch_means = nn.ModuleDict()

    def forget_step(self) -> None:
        """A run begins: a step that an earlier one was stopped in does not count. The strategy calls it."""
        self._window_sums.clear()
        self._last_logged.clear()

    def configure_optimizers(self) -> Any:
        """The optimizer over all trainable parameters, and its schedule."""
        optimizer = self._make_optimizer([weight for weight in self._self.parameters() if weight.requires_grad])
        if self._make_lr_scheduler is None:
            return optimizer
        scheduler = self._make_lr_scheduler(optimizer)
        entry: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):
            entry = {"scheduler": scheduler, "interval": "epoch", "monitor": scheduler.monitor}
        return {"optimizer": optimizer, "lr_scheduler": entry}

    @property
    def attention_masks(self) -> tuple[Mask, ...]:
        """The masks of the model's attention calls, by which ``layout: auto`` chooses; the default is plain causal.

        Override it if layers have windows. It is read before ``configure_model``; it never changes the numbers.
        """
        return (Mask(),)

    def tensor_parallel_plan(self) -> TensorPlan:
        """How tensor ranks share the module's matrices: override it to train with ``tensor`` above 1.

        Read after ``configure_model``. Every tensor rank then gets the same tokens, computes the same loss, and must
        see the same activations wherever the plan does not say that they are cut. For instance, for the MLPs of a
        module with blocks ``layers`` (``from torch.distributed.tensor.parallel import ...``):

            return {"layers.*.mlp.up": ColwiseParallel(), "layers.*.mlp.down": RowwiseParallel()}

        Returns:
            See ``models.tensor_plan.TensorPlan``. The default takes the plans that Hugging Face models in the module
            carry.
        """
        return hugging_face_plans(self._self)

    def token_mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """The loss to return from ``training_step``: tells the strategy over how many tokens it is a mean.

        Args:
            total: Sum of losses over this rank's tokens, a scalar.
            count: How many tokens those were; 0 gives a loss of 0 that is still in the graph.

        Returns:
            The mean over this rank's tokens. Its gradient becomes that of the mean over all ranks and micro-batches.
        """
        trainer = attached_trainer(self._self)
        if trainer is not None and trainer.training and isinstance(trainer.strategy, LongContextStrategy):
            trainer.strategy.record_loss_count(count)
        return total / torch.as_tensor(count, device=total.device).clamp(min=1)

    def log_tokens(
        self, name: str, total: Tensor, count: Tensor | int, prog_bar: bool = False, exponentiate: bool = False
    ) -> None:
        """Log a mean over all tokens of all ranks: of an optimizer step in training, of the epoch in evaluation.

        All ranks get the same value, so it may be monitored. Call it in a step, on every rank.

        Args:
            name: As in ``self.log``.
            total: Sum over this rank's tokens in the current batch, a scalar.
            count: How many tokens those were.
            prog_bar: Show it in the progress bar.
            exponentiate: Log ``exp(mean)``: of a cross entropy, the perplexity.
        """
        total = total.detach()
        count = torch.as_tensor(count, device=total.device)
        if self._self.trainer.training:
            self._log_step(name, total, count, prog_bar, exponentiate)
        else:
            self._log_epoch(name, total, count, prog_bar, exponentiate)

    def _log_step(self, name: str, total: Tensor, count: Tensor, prog_bar: bool, exponentiate: bool) -> None:
        trainer = self._self.trainer
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        if self._last_logged.get(name) == (trainer.current_epoch, step):
            raise ValueError(
                f"log_tokens({name!r}) was called twice in one training step, and can only be of one mean: add up sums "
                "and counts and call it once, or use two names."
            )
        self._last_logged[name] = (trainer.current_epoch, step)
        if is_first_of_window(trainer):
            self._window_sums.pop(name, None)
        pair = torch.stack([total.double(), count.double()])
        self._window_sums[name] = self._window_sums[name] + pair if name in self._window_sums else pair
        if not is_last_of_window(trainer):
            return
        sums = sum_over_ranks(trainer, self._window_sums.pop(name))
        mean = sums[0] / sums[1]
        value = (mean.exp() if exponentiate else mean).float()
        self._self.log(name, value, on_step=True, on_epoch=False, prog_bar=prog_bar, sync_dist=False, batch_size=1)

    def _log_epoch(self, name: str, total: Tensor, count: Tensor, prog_bar: bool, exponentiate: bool) -> None:
        trainer = self._self.trainer
        # The sanity check and validation share their results, hence this prefix.
        stage = trainer.state.stage.dataloader_prefix if trainer.state.stage else None
        key = f"{stage}_{name}_{current_dataloader(trainer)}".replace(".", "_")
        if key not in self._epoch_means:
            strategy = trainer.strategy
            group = strategy.mesh.loss_group if isinstance(strategy, LongContextStrategy) else None
            self._epoch_means[key] = TokenMean(group, exponentiate).to(total.device)
        metric = cast("TokenMean", self._epoch_means[key])
        metric.update(total, count)
        self._self.log(
            name,
            metric,
            on_step=False,
            on_epoch=True,
            prog_bar=prog_bar,
            batch_size=1,
            metric_attribute=f"_epoch_means.{key}",  # Lightning looks metrics up once, before this one was made
        )

    @property
    def _self(self) -> LightningModule:
        return cast("LightningModule", self)


def sum_over_ranks(trainer: Trainer, sums: Tensor) -> Tensor:
    """Add a tensor up over the ranks that hold different tokens."""
    strategy = trainer.strategy
    if isinstance(strategy, LongContextStrategy):
        return strategy.sum_over_tokens(sums)
    return strategy.reduce(sums, reduce_op="sum")
