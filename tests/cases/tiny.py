"""The model, the data and the Trainer that the cases share; importable by the ranks of a pool."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_longctx import CausalLM, Degrees, LongContextStrategy
from lightning_longctx.models import Decoder, DecoderConfig
from lightning_longctx.sequence import layout_ranges
from lightning_longctx.strategy.gradients.norms import whole
from lightning_longctx.topology import axis_rank

TINY = DecoderConfig(vocab_size=32, width=16, num_layers=2, num_heads=4, num_kv_heads=2)
LENGTH, LEARNING_RATE = 16, 0.1
SGD = partial(torch.optim.SGD, lr=LEARNING_RATE)
QUIET: dict[str, Any] = dict(
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
    use_distributed_sampler=False,
)


def tiny_decoder() -> Decoder:
    """The reference: the same weights on one process, in float64."""
    torch.manual_seed(0)
    return Decoder(TINY).double()


def tiny_module() -> CausalLM:
    """The same weights in a run: the Trainer builds the decoder first thing."""
    torch.manual_seed(0)
    return CausalLM(TINY, optimizer=SGD)


def make_trainer(degrees: Degrees, layout: str = "zigzag", sharding: str = "replicate", **options: Any) -> Trainer:
    strategy = LongContextStrategy(degrees, layout=layout, sharding=sharding)  # type: ignore[arg-type]
    defaults = dict(devices=dist.get_world_size(), max_epochs=1)
    return Trainer(strategy=strategy, **{**QUIET, **defaults, **options})


def data_rank(degrees: Degrees) -> tuple[int, int]:
    """This process's data rank, and how many there are."""
    resolved = degrees.resolve(dist.get_world_size())
    return axis_rank(resolved, dist.get_rank(), "data"), resolved.data  # type: ignore[return-value]


def samples(count: int, length: int = LENGTH, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences in which few labels count, most of them early: shards have very different numbers, some none."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        tokens = torch.randint(TINY.vocab_size, (length,), generator=generator)
        labels = tokens.clone()
        labels[2 + 5 * (index % 3) :] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def token_losses(decoder: Decoder, made: list[dict[str, Tensor]]) -> Tensor:
    """Losses of all tokens that count, one after another, by the most direct way there is."""
    logits = decoder(torch.stack([sample["input_ids"] for sample in made]))[:, :-1]
    labels = torch.stack([sample["labels"] for sample in made])[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return losses[labels.flatten() != -100]


def positions_by_rank(layout: str, length: int, num_ranks: int) -> list[list[int]]:
    """Global positions of every context rank."""
    shards = layout_ranges(layout, length, num_ranks)  # type: ignore[arg-type]
    return [[position for piece in shard for position in piece] for shard in shards]


def named_weights(module: LightningModule) -> dict[str, Tensor]:
    """Whole parameters as this rank sees them. A collective under ``fsdp``."""
    return {name: whole(weight.detach()).clone() for name, weight in module.named_parameters()}


class Gradients(Callback):
    """Whole gradients of every step, as this rank sees them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        named = module.named_parameters()
        self.steps.append({name: whole(weight.grad).clone() for name, weight in named if weight.grad is not None})


def assert_equal_numbers(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Same names, every element within ``tolerance`` of the larger of 1 and the tensor's largest element."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (actual[name].double() - tensor.double()).abs().max()
        assert difference <= tolerance * max(1.0, float(tensor.abs().max())), f"{name} differs by {difference:.3g}"
