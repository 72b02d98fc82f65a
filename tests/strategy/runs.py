"""What ranks of a pool run: a Trainer over the strategy, and what it left behind as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader

from lightning_longctx.strategy import LongContextStrategy, ShardingOptions
from lightning_longctx.topology import Degrees
from tests.strategy.modules import LENGTH, Plain, samples

QUIET = dict(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)


@dataclass(frozen=True)
class Run:
    """One training run, as values that travel to a rank."""

    degrees: Degrees = Degrees()
    layout: str = "zigzag"
    sharding: str = "replicate"
    options: ShardingOptions = ShardingOptions()
    style: str = "self"
    tied: bool = False
    accumulate: int = 1
    clip: float | None = None
    num_samples: int = 6
    length: int = LENGTH
    seed_by_rank: bool = False
    precision: str = "32-true"


def trainer(run: Run, num_ranks: int, **options: Any) -> Trainer:
    keywords: Any = dict(layout=run.layout, sharding=run.sharding, sharding_options=run.options)
    strategy = LongContextStrategy(run.degrees, **keywords)
    defaults = dict(devices=num_ranks, max_epochs=1, accumulate_grad_batches=run.accumulate, num_sanity_val_steps=0)
    return Trainer(
        strategy=strategy,
        use_distributed_sampler=False,
        gradient_clip_val=run.clip,
        precision=run.precision,  # type: ignore[arg-type]
        **{**QUIET, **defaults, **options},
    )


def build(run: Run) -> Plain:
    torch.manual_seed(7 + (torch.distributed.get_rank() if run.seed_by_rank else 0))
    return Plain(run.style, run.tied)


def data(run: Run) -> DataLoader:
    """This data rank's samples, in turn."""
    sharing = run.degrees.context * run.degrees.head
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mine = samples(run.num_samples, run.length)[rank // sharing :: world // sharing]
    return DataLoader(mine, batch_size=1)  # type: ignore[arg-type]


def weights(module: LightningModule) -> dict[str, Tensor]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {key: value.clone() for key, value in get_model_state_dict(module, options=options).items()}


def fit(run: Run) -> tuple[list[float], dict[str, Tensor]]:
    """Train; gradient norms and whole weights (the latter on rank 0 only)."""
    module = build(run)
    trainer(run, torch.distributed.get_world_size()).fit(module, data(run))
    return module.norms, weights(module)
