"""Tokens per second of the whole run, each token counted once, and how busy that keeps the devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_longctx._upstream import is_last_of_window, writes_metrics
from lightning_longctx.callbacks.utilization import ModelWork, document_lengths, model_work, utilization
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.strategy import LongContextStrategy


class ThroughputCallback(Callback):
    """Log ``tokens_per_second`` (in the progress bar, too) and ``step_seconds``; with ``peak_flops``, ``mfu`` as well.

    All are means over the optimizer steps since the last logged one, and the same number on every rank.

    *Which tokens*: those whose label counts towards the loss, over all ranks, each once, however many ranks share the
    sequence. Padding and masked prompts are work, but not tokens. Batches without labels count every position.

    *Which seconds*: the wall time of training, waiting for data included. The clock stands still from the start of a
    validation run or the writing of a checkpoint until the next batch begins. (A checkpoint of
    ``save_weights_only=True`` tells no callback, and is not left out.)

    Args:
        warmup_steps: Optimizer steps at the start of ``fit`` that are not counted: they compile, allocate and fill
            caches.
        peak_flops: What one device could do at best, in FLOPs per second, as the maker says for the dtype that is
            computed in: 989e12 for an H100 SXM in bfloat16, without sparsity. Then ``mfu`` is logged: the FLOPs that
            the model's work has (``callbacks.utilization``; masks, windows and documents as they are, nothing that is
            recomputed) over those of all devices in the time. Padding is work.

    Raises:
        ValueError: ``warmup_steps`` is negative, ``peak_flops`` is not positive or set for a module that does not say
            what its attention costs, or the strategy is not ``LongContextStrategy``.
    """

    def __init__(self, warmup_steps: int = 1, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not 0 < peak_flops < float("inf"):
            raise ValueError(f"peak_flops={peak_flops} must be positive and finite; null leaves mfu out.")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must not be negative.")
        self.warmup_steps = warmup_steps
        self.peak_flops = peak_flops
        self._work: ModelWork | None = None
        self._clock = Stopwatch()
        self._num_warm = 0
        self._clear()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, LongContextStrategy):
            raise ValueError(
                "ThroughputCallback counts tokens by the batch's 'sequence' entry, which LongContextStrategy adds. Set "
                "trainer.strategy to it, or leave the callback out."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._num_warm = 0
        self._work = None if self.peak_flops is None else model_work(pl_module)
        self._clear()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._clock.start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._stop(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_tokens += num_tokens(batch)
        self._flops += 0.0 if self._work is None else num_flops(batch, self._work)
        if not is_last_of_window(trainer):
            return
        self._num_steps += 1
        if self._num_warm < self.warmup_steps:
            self._num_warm += 1
            self._restart(pl_module)
        if writes_metrics(trainer) and self._num_steps:
            self._log(trainer, pl_module)
            self._restart(pl_module)

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(pl_module)
        assert isinstance(trainer.strategy, LongContextStrategy)  # setup has seen to it
        counted = (self._num_tokens, self._flops, self._clock.seconds)
        tokens, flops, seconds = reduced(trainer.strategy, *counted, pl_module.device)
        values = {"step_seconds": seconds / self._num_steps, "tokens_per_second": shown(tokens / seconds)}
        if self.peak_flops is not None:
            values["mfu"] = utilization(flops, seconds, trainer.world_size, self.peak_flops)
        for name, value in values.items():
            in_bar = name == "tokens_per_second"
            pl_module.log(name, value, prog_bar=in_bar, on_step=True, on_epoch=False, batch_size=1)

    def _restart(self, pl_module: LightningModule) -> None:
        synchronize(pl_module.device)
        self._clear()
        self._clock.start()

    def _clear(self) -> None:
        self._num_tokens, self._num_steps, self._flops = 0, 0, 0.0
        self._clock.clear()

    def _stop(self, pl_module: LightningModule) -> None:
        synchronize(pl_module.device)
        self._clock.stop()


class Stopwatch:
    """Adds up wall time while it runs; starting or stopping it twice changes nothing."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Stop, and forget."""
        self.seconds, self._since = 0.0, None

    def start(self) -> None:
        """Run on from here."""
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Stand still."""
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None


def shown(rate: float) -> float:
    """In whole tokens from 1,000 a second on: the progress bar writes 12345.6 as 1.23e+4, and 12346 as it is."""
    return float(round(rate)) if rate >= 1000 else rate


def num_tokens(batch: Any) -> int:
    """Tokens of an uncut batch of this data rank: labels that count, or all positions if there are no labels."""
    return sum(_tokens_of(entry) for entry in cut_batches(batch))


def num_flops(batch: Any, work: ModelWork) -> float:
    """Of a training step on an uncut batch of this data rank, forward and backward."""
    entries = cut_batches(batch)
    return sum(work.flops(document_lengths(entry["sequence"], _num_rows(entry))) for entry in entries)


def cut_batches(batch: Any) -> Iterator[Mapping[str, Any]]:
    """The dictionaries in a batch, of one loader or of several combined, that carry a ``sequence`` record."""
    if isinstance(batch, Mapping):
        if isinstance(batch.get("sequence"), SequenceRecord):
            yield batch
            return
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for entry in batch:
            yield from cut_batches(entry)


def _tokens_of(batch: Mapping[str, Any]) -> int:
    record = batch["sequence"]
    if record.num_valid_tokens >= 0:
        return record.num_valid_tokens
    return _num_rows(batch) * record.length


def _num_rows(batch: Mapping[str, Any]) -> int:
    return len(batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"])


def reduced(
    strategy: LongContextStrategy, num_local_tokens: int, local_flops: float, seconds: float, device: torch.device
) -> tuple[float, float, float]:
    """Tokens and FLOPs of all data ranks, and the mean of the ranks' seconds. Collective over the loss ranks."""
    local = torch.tensor([num_local_tokens, local_flops, seconds], dtype=torch.float64, device=device)
    tokens, flops, total_seconds = strategy.sum_over_tokens(local).tolist()
    # Every rank that shares a sequence counted the whole of it.
    num_sharing = strategy.mesh.num_loss_ranks // strategy.mesh.device_mesh.shape[0]
    return tokens / num_sharing, flops / num_sharing, total_seconds / strategy.mesh.num_loss_ranks


def synchronize(device: torch.device) -> None:
    """Wait for queued work, so that a reading of the clock means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
