"""SmolLM2-135M, fine-tuned with SGD on Python source by the ranks of a pool."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, LongContextStrategy
from lightning_longctx._resources import recipes_dir
from lightning_longctx.callbacks.memory import peaks
from lightning_longctx.data import PretrainedTokenizer, standard_library
from lightning_longctx.strategy.gradients.norms import whole
from tests.parity.runs import Recorder
from tests.strategy.runs import QUIET


@dataclass(frozen=True)
class FineTuning:
    """Steps on one sample each; ``recompute`` keeps a block's input only, and computes the rest again in backward.

    With SGD a rate of 0.1 is too large: at 8,192 tokens the third loss is 11.
    """

    length: int
    steps: int
    degrees: Degrees = Degrees()
    recompute: bool = False
    sharding: Literal["replicate", "fsdp"] = "replicate"
    lr: float = 0.02


@dataclass
class Outcome:
    """Mean loss, gradient norm and seconds of every step; resident sets of the ranks; and where the weights are."""

    losses: list[float]
    norms: list[float]
    seconds: list[float]
    peak_gib: list[float]
    weights: Path


class Watch(Recorder):
    """Seconds of every step, besides what ``Recorder`` keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.since = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.since = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self.since)
        super().on_train_batch_end(trainer, module, *args)
        if dist.get_rank() == 0:
            print(f"step {len(self.losses)}: loss {self.losses[-1]:.7f}, {self.seconds[-1]:.1f} s", flush=True)


def fine_tune(run: FineTuning, folder: Path) -> Outcome:
    """Train on this rank's part; rank 0 writes the weights below ``folder``."""
    world = dist.get_world_size()
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    try:
        kind = recomputing_lm() if run.recompute else CausalLM
        module = kind(optimizer=partial(torch.optim.SGD, lr=run.lr), pretrained="smollm2")
        watch = Watch()
        strategy = LongContextStrategy(run.degrees, "zigzag", sharding=run.sharding)
        trainer = Trainer(devices=world, strategy=strategy, max_steps=run.steps, callbacks=[watch], **QUIET)
        trainer.fit(module, DataLoader(python_source(run.length, run.steps)))
    finally:
        torch.set_num_threads(before)
    weights = {name: whole(weight.detach()) for name, weight in module.named_parameters()}
    file = folder / f"weights-{world}.pt"
    if dist.get_rank() == 0:
        torch.save(weights, file)
    peak = torch.tensor(peaks(torch.device("cpu")))
    every = [torch.zeros_like(peak) for _ in range(world)]
    dist.all_gather(every, peak)
    return Outcome(watch.losses, watch.norms, watch.seconds, torch.cat(every).tolist(), file)


def recomputing_lm() -> type[CausalLM]:
    """The model class of the shipped recipe."""
    if str(recipes_dir()) not in sys.path:
        sys.path.append(str(recipes_dir()))
    return import_module("smollm2_135m_8k").RecomputingLM


def python_source(length: int, count: int) -> list[dict[str, Tensor]]:
    """The standard library from ``argparse.py`` on, as ``count`` samples of ``length`` tokens."""
    tokenizer, corpus = PretrainedTokenizer("smollm2", eos="<|endoftext|>"), standard_library()
    tokens: list[int] = []
    for name in corpus.names[corpus.names.index("argparse.py") :]:
        tokens += [*tokenizer.encode(corpus.path(name).read_text(encoding="utf-8")), tokenizer.eos_id]
        if len(tokens) >= length * count:
            break
    rows = torch.tensor(tokens[: length * count], dtype=torch.int64).view(count, length)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]
