"""A training step in bare PyTorch, and what lets it alternate with the steps of a Trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_longctx._upstream import through_forward
from lightning_longctx.attention.rings import find_ring
from lightning_longctx.loss import token_cross_entropy
from lightning_longctx.mixins import NextTokenMixin
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.contents import read_batch
from lightning_longctx.strategy.gradients.norms import whole

BARE, LONGCTX = "bare", "longctx"


class BareLoop:
    """The recipe's model, data and optimizer in a loop that a user would write without Lightning.

    The operations are the same: batches cut for this rank, ring attention, the loss over all tokens, FSDP2, clipping,
    the optimizer and its schedule. There are no hooks, logs, checks or progress.

    Args:
        module: The Trainer's, distributed.
        blank: A copy of it as it was before ``configure_model``; its call gives logits. It gets the module's weights.
        trainer: Whose strategy distributes the copy.
    """

    def __init__(self, module: LightningModule, blank: LightningModule, trainer: Trainer) -> None:
        assert isinstance(trainer.strategy, LongContextStrategy)
        self._trainer, self._strategy = trainer, trainer.strategy
        if trainer.strategy.memory.options.policy == "auto":
            raise ValueError("checkpointing.policy=auto would change one of the two loops only. Use selective or full.")
        self._module: Any = blank
        blank.configure_model()
        weights = {name: whole(weight.detach()) for name, weight in module.named_parameters()}
        blank.load_state_dict(weights, strict=False)
        self._strategy.distribute_parameters(blank.train())
        made: Any = blank.configure_optimizers()
        self._optimizer = made["optimizer"] if isinstance(made, dict) else made
        self._scheduler = made["lr_scheduler"]["scheduler"] if isinstance(made, dict) else None
        self._batches = self._endless()

    def step(self) -> tuple[Tensor, Any]:
        """Train on one batch; returns the loss over all tokens, and the batch."""
        batch = next(self._batches)
        with self._trainer.precision_plugin.train_step_context():
            total, count = self._loss(batch)
        sums = torch.stack([total.detach().double(), count.double()])
        mesh = self._strategy.mesh
        dist.all_reduce(sums, group=mesh.loss_group)
        (total * (mesh.num_loss_ranks / sums[1]).to(total.dtype)).backward()
        if (limit := self._trainer.gradient_clip_val) is not None:
            by_value = self._trainer.gradient_clip_algorithm == "value"
            clip = torch.nn.utils.clip_grad_value_ if by_value else torch.nn.utils.clip_grad_norm_
            clip(self._module.parameters(), float(limit))
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()
        return sums[0] / sums[1], batch

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """By the operations of the module's own steps, if it has them apart from its logs."""
        if isinstance(self._module, NextTokenMixin):
            return through_forward(cast("LightningModule", self._module), "next_token_loss", batch)
        output = self._module(batch)
        return token_cross_entropy(getattr(output, "logits", output), batch["shift_labels"])

    def _endless(self) -> Iterator[Any]:
        data: Any = self._trainer.datamodule  # type: ignore[attr-defined]
        loader: Any = self._strategy.process_dataloader(data.train_dataloader())
        while True:
            for batch in loader:
                yield self._strategy.batch_to_device(batch, self._strategy.root_device)


@dataclass
class Steps:
    """What one system did in every step, on one rank."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)


class Alternation(Callback):
    """Runs a bare step after every step of the Trainer, and times both; each begins at a barrier.

    What the Trainer does after ``on_train_batch_end`` counts into its next step. Must be the last callback. When
    training has ended, ``by_rank`` has the steps of ``BARE`` and ``LONGCTX`` on every rank.

    Args:
        blank: A copy of the module as it was before ``configure_model``.
    """

    def __init__(self, blank: LightningModule) -> None:
        self._blank = blank
        self._steps = {BARE: Steps(), LONGCTX: Steps()}
        self.by_rank: list[dict[str, Steps]] = []
        self._start, self._sent_before = 0.0, 0
        self._loop: BareLoop

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loop = BareLoop(pl_module, self._blank, trainer)
        self._mark(None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note(LONGCTX, trainer.callback_metrics["train_loss"], batch)
        self._mark(batch)
        loss, batch = self._loop.step()
        self._note(BARE, loss, batch)
        self._mark(batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.by_rank = [{} for _ in range(trainer.world_size)]
        dist.all_gather_object(self.by_rank, self._steps)

    def _mark(self, batch: Any) -> None:
        dist.barrier()
        self._sent_before = sent_bytes(batch)
        self._start = time.perf_counter()

    def _note(self, system: str, loss: Tensor, batch: Any) -> None:
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)
        steps = self._steps[system]
        steps.seconds.append(time.perf_counter() - self._start)
        steps.sent.append(sent_bytes(batch) - self._sent_before)
        steps.losses.append(float(loss))


def sent_bytes(batch: Any) -> int:
    """What this rank has sent in attention so far, over the rings of a batch."""
    rings = {record.ring for record in read_batch((batch,)).records}
    return sum(ring.sent_bytes.total() for name in rings if (ring := find_ring(name)) is not None)
