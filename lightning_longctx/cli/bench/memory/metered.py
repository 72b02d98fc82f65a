"""The steps of a Trainer, measured one by one."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_longctx.cli.bench.memory.meter import Meter, Step
from lightning_longctx.cli.bench.memory.samples import RandomTokens

NUM_SETTLING = 3
"""Steps before anything is measured. The optimizer makes its state in the first, ``policy=auto`` ends in the third."""


class Conductor(Protocol):
    """Says what each measured step is to be."""

    @property
    def settling_tokens(self) -> int:
        """Length of the sequences before anything is measured."""
        ...

    def begin(self, trainer: Trainer) -> int:
        """The run has settled: prepare the first measured step, and return its length."""
        ...

    def traced(self) -> bool:
        """Whether to count the bytes of tensors in the step that begins."""
        ...

    def after(self, trainer: Trainer, step: Step) -> int | None:
        """Take down a step, prepare the next one and return its length; None if there is none."""
        ...

    def describe(self, step: Step) -> str:
        """A line on the step that has ended, before ``after``."""
        ...


class MeteredSteps(Callback):
    """Measures every step of training, after the first ones, and ends training when the conductor says so.

    Must be the only callback that takes memory: what others do in a step counts.

    Args:
        samples: Of the run.
        conductor: Decides on every rank alike.
    """

    def __init__(self, samples: RandomTokens, conductor: Conductor) -> None:
        self._samples, self._conductor = samples, conductor
        self._num_ended = 0
        self._samples.tokens = conductor.settling_tokens

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter = Meter(pl_module, pl_module.device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._num_ended >= NUM_SETTLING:
            self._meter.begin(batch, trace=self._conductor.traced())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._meter.before_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_ended += 1
        if self._num_ended < NUM_SETTLING:
            return
        if self._num_ended == NUM_SETTLING:
            self._samples.tokens = self._conductor.begin(trainer)
            return
        step = self._meter.end(batch, outputs["loss"])
        if trainer.is_global_zero:
            print(self._conductor.describe(step), file=sys.stderr, flush=True)
        tokens = self._conductor.after(trainer, step)
        if tokens is None:
            trainer.should_stop = True
        else:
            self._samples.tokens = tokens
