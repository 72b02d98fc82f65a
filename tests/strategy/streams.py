"""Runs that write down which samples they see, and go on from each other's checkpoints; importable by ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_longctx.mixins import LongContextMixin
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.topology import Degrees
from tests.strategy.runs import QUIET

LENGTH = 4


def sample(index: int) -> dict[str, Tensor]:
    row = torch.full((LENGTH,), index)
    return {"input_ids": row, "labels": row}


class Rows(Dataset):
    """Sample ``i`` consists of the token ``i``; with ``draws``, one number is drawn for each."""

    def __init__(self, count: int, draws: bool = False) -> None:
        self.count = count
        self.draws = draws

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = {"drawn": torch.rand(())} if self.draws else {}
        return sample(index) | drawn


class Lines(IterableDataset):
    """The same in turn, as a stream."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.share = (0, 1)

    def set_data_rank(self, rank: int, num_ranks: int) -> None:
        self.share = (rank, num_ranks)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first = self.share[0] + number * self.share[1]
        return (sample(index) for index in range(first, self.count, self.share[1] * workers))


class StatefulLines(Lines):
    """Begins wherever its state says."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while (index := self.at * self.share[1] + self.share[0]) < self.count:
            self.at += 1
            yield sample(index)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


Step = tuple[int, int, int, list[Any], bool]
"""Epoch, number in it, number of all, samples with what was drawn for them, and whether they count."""


class Seen(LongContextMixin, LightningModule):
    """Learns next to nothing, and remembers what it was shown in which step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps: list[Step] = []
        self.hooks: list[tuple[str, int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        batch, *others = batch if isinstance(batch, list) else [batch]
        ids = [index for part in (batch, *others) for index in part["input_ids"][:, 0].tolist()]
        total = self.trainer.fit_loop.epoch_loop.total_batch_idx
        counts = batch["sequence"].num_valid_tokens > 0
        self.steps.append(
            (self.current_epoch, batch_idx, total, ids + batch.get("drawn", torch.ones(0)).tolist(), counts)
        )
        states = batch["input_ids"][:, None, :, None].float().expand(-1, 1, -1, 8)
        attended = F.scaled_dot_product_attention(states, states, states, is_causal=True)
        return self.token_mean(self.weight.sum() + 0 * attended.sum(), len(ids))

    def validation_step(self, batch: dict[str, Any]) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        self.hooks.append(("epoch_end", self.current_epoch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EstimatesSteps(Seen):
    """Asks for the length of training, which makes Lightning begin with the loaders before a checkpoint is read."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class SaveAt(Callback):
    """Saves once, in the given hook, when so many optimizer steps (or micro-batches) have been taken."""

    def __init__(self, path: Path, hook: str, batches: int) -> None:
        self.path = path
        self.batches = batches
        self.saved = False
        setattr(self, hook, self._save)

    def _save(self, trainer: Trainer, module: Any, *_: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if not self.saved and progress >= self.batches and not trainer.sanity_checking:
            self.saved = True
            trainer.save_checkpoint(self.path)


@dataclass(frozen=True)
class Run:
    """One run, as values that travel to a rank."""

    count: int = 14
    batch_size: int = 1
    degrees: Degrees = Degrees()
    workers: int = 0
    persistent: bool = False
    shuffle: bool = True
    kind: str = "rows"
    drop_last: bool = False
    validation: int = 0
    draws: bool = False
    estimates: bool = False
    dealing: bool = True
    folder: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Run:
        return replace(self, **changes)


def loader(run: Run) -> Any:
    options: dict[str, Any] = dict(batch_size=run.batch_size, num_workers=run.workers, drop_last=run.drop_last)
    options |= {"persistent_workers": True} if run.persistent else {}
    if run.kind == "rows":
        return DataLoader(Rows(run.count, run.draws), shuffle=run.shuffle, **options)
    if run.kind in ("lines", "stateful lines"):
        return DataLoader((Lines if run.kind == "lines" else StatefulLines)(run.count), **options)
    if run.kind == "combined":
        both = [DataLoader(Rows(count), shuffle=True) for count in (run.count, 3 * run.count // 2)]
        return CombinedLoader(both, "max_size_cycle")
    if run.kind == "litdata":
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(str(run.folder), shuffle=run.shuffle, drop_last=True)
        return StreamingDataLoader(dataset, batch_size=run.batch_size, num_workers=run.workers)
    from torchdata.stateful_dataloader import StatefulDataLoader

    if run.kind == "torchdata rows":
        return StatefulDataLoader(Rows(run.count, run.draws), shuffle=run.shuffle, **options)
    return StatefulDataLoader(StatefulLines(run.count), **options)


def write_litdata(folder: Path, count: int) -> None:
    """Samples as litdata keeps them, four to a chunk."""
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder), chunk_size=4)
    for index in range(count):
        cache[index] = sample(index)
    cache.done()
    cache.merge()


def train(run: Run, resume: Path | None = None, save: Path | None = None, callbacks: tuple[Any, ...] = ()) -> Seen:
    module = (EstimatesSteps if run.estimates else Seen)()
    trainer = Trainer(
        strategy=LongContextStrategy(run.degrees),
        devices=dist.get_world_size(),
        callbacks=[SaveAt(*arguments) for arguments in callbacks],
        use_distributed_sampler=run.dealing,
        num_sanity_val_steps=0,
        **QUIET,  # type: ignore[arg-type]
        **({"max_epochs": 2} | run.options),
    )
    torch.manual_seed(0)
    validation = [DataLoader(Rows(run.validation))] if run.validation else []
    trainer.fit(module, loader(run), *validation, ckpt_path=resume)
    module.hooks.append(("logged", trainer.fit_loop.epoch_loop._batches_that_stepped))
    if save is not None:
        trainer.save_checkpoint(save)
    return module


def seen(run: Run, resume: Path | None = None, save: Path | None = None) -> list[Step]:
    """The steps of ``train``."""
    return train(run, resume, save).steps


def several(tasks: list[tuple[Run, Path | None, Path | None]]) -> list[list[Step]]:
    """The same of several runs, one after another."""
    return [seen(*task) for task in tasks]


def seen_and_after(run: Run, moment: tuple[str, int], path: Path, then: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Steps and hooks of a run that saves on its way and never stops, and of one that goes on from there."""
    whole = train(run, callbacks=((path, *moment),))
    rest = train(run.but(options=run.options | then), resume=path)
    return whole.steps, whole.hooks, rest.steps, rest.hooks
