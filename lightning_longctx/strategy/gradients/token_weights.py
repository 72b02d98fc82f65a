"""The loss rule: gradients of the mean over all tokens that count, whatever rank and micro-batch they are in.

A module returns the mean over its own ``n`` valid labels. Gradients are averaged over the ``F`` ranks that hold
different tokens, so the backward pass starts from ``loss * n * F / N``, with ``N`` the valid labels on all of them.
Over an accumulation window the divisor must be the window's ``N``, which is known only at its end: every micro-batch
divides by that of the first, which keeps gradients at their usual size, and the step is preceded by one correction.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_longctx._upstream import announced, discard_unsynced_gradients
from lightning_longctx.batch import IGNORE
from lightning_longctx.strategy.contents import LABELS, BatchContents
from lightning_longctx.strategy.gradients.absent import zero_if_absent
from lightning_longctx.topology.mesh import ParallelMesh

UNWEIGHTED_MEAN = (
    "self.log(..., sync_dist=True) takes the plain mean over processes, which hold different numbers of tokens. For a "
    "mean over tokens use self.log_tokens(name, sum, count) of LongContextMixin."
)


class TokenWeights:
    """Weights of micro-batches and ranks in a gradient.

    Args:
        mesh: The ranks to sum over.
        device: Where counts are kept.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._contents = BatchContents()
        self._recorded: Tensor | None = None
        self._reference: Tensor | None = None  # N of the window's first micro-batch
        self._window: Tensor | None = None  # N of the window so far
        self._num_micro_batches = 0

    def begin(self, contents: BatchContents) -> None:
        """Start a training step on a batch."""
        self._contents = contents
        self._recorded = None

    def record(self, count: Tensor | int) -> None:
        """Declare how many local tokens the loss of this step is a mean over, instead of those of ``shift_labels``.

        Raises:
            ValueError: Another count was declared in the same step.
        """
        counted = torch.as_tensor(count, device=self._device).detach().to(torch.int64)
        if self._recorded is not None and not torch.equal(self._recorded, counted):
            raise ValueError(
                f"the losses of one training step are means over {int(self._recorded)} and {int(counted)} tokens of "
                "this rank: their sum has no single weight. Combine sums and counts first: token_mean(a + b, n + m)."
            )
        self._recorded = counted

    def scaled(self, loss: Tensor, module: nn.Module, *, first: bool, num_micro_batches: int) -> Tensor:
        """What to differentiate in a micro-batch under automatic optimization.

        Args:
            loss: The module's mean, divided by ``num_micro_batches`` as Lightning does.
            module: Gradients of an earlier window that never came to its step are dropped from it.
            first: Whether the micro-batch starts a window.
            num_micro_batches: ``accumulate_grad_batches``.
        """
        if first and self._window is not None:
            self.reset()
            discard_unsynced_gradients(module)
        count, total = self._counts()
        if self._window is None or self._reference is None:
            self._reference, self._window = total.clamp(min=1), total
        else:
            self._window = self._window + total
        self._num_micro_batches += 1
        return self._weighted(loss, count, self._reference, num_micro_batches)

    def scaled_alone(self, loss: Tensor, module: nn.Module) -> Tensor:
        """What to differentiate in one ``manual_backward``: each is a mean over its own batch.

        A loss on distributed parameters alone, as a penalty on weights after another backward, is the same on all
        ranks already, and so are its gradients.
        """
        if isinstance(loss, DTensor):
            return loss
        count, total = self._counts()
        return announced(module, self._weighted(loss, count, total.clamp(min=1), 1))

    @torch.no_grad()
    def finish_window(self, module: nn.Module) -> None:
        """Correct the accumulated gradients from the first micro-batch's divisor to the window's."""
        if self._num_micro_batches > 1 and self._reference is not None and self._window is not None:
            factor = self._reference.double() / self._window.clamp(min=1)
            for parameter in module.parameters():
                if parameter.grad is not None:
                    grad = parameter.grad
                    _multiply(grad.to_local() if isinstance(grad, DTensor) else grad, factor)
        self.reset()

    def reset(self) -> None:
        """Forget the window."""
        self._reference = self._window = None
        self._num_micro_batches = 0

    def _weighted(self, loss: Tensor, count: Tensor, divisor: Tensor, num_micro_batches: int) -> Tensor:
        wide = torch.promote_types(loss.dtype, torch.float32)
        factor = self._mesh.num_loss_ranks * num_micro_batches
        return zero_if_absent(loss, count) * (count.to(wide) * factor / divisor.to(wide))

    def _counts(self) -> tuple[Tensor, Tensor]:
        """Valid labels of this rank, and of all, counted as they are now."""
        count = self._recorded if self._recorded is not None else (self._only_labels() != IGNORE).sum().to(self._device)
        total = count.clone()
        dist.all_reduce(total, group=self._mesh.loss_group)
        return count, total

    def _only_labels(self) -> Tensor:
        labels = self._contents.labels
        if len(labels) == 1:
            return labels[0]
        way_out = "return self.token_mean(loss_sum, num_tokens) of LongContextMixin from training_step"
        if not labels:
            raise ValueError(
                f"the batch of this training step has no {LABELS}, so the strategy cannot know how many tokens the "
                f"loss is a mean over. Put labels into the batch (collate_fn), or {way_out}."
            )
        raise ValueError(
            f"the batch of this training step has {len(labels)} {LABELS} entries (a CombinedLoader's?), so it is not "
            f"known which of them the loss is a mean over. To say it, {way_out}."
        )


def _multiply(grad: Tensor, factor: Tensor) -> None:
    """Scale in place; a narrow gradient by the factor itself, not by what it is rounded to on accelerators."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    factor = factor.to(grad.device, wide)  # elsewhere under cpu_offload
    if grad.dtype == wide:
        grad.mul_(factor)
    else:
        grad.copy_(grad.to(wide).mul_(factor))
