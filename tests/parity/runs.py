"""Small training runs, each a value; what every rank executes, and what it brings back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, LongContextStrategy, ShardingOptions
from lightning_longctx.memory.policy import Checkpointing
from lightning_longctx.models import Decoder, DecoderConfig
from lightning_longctx.plan.communication import Communication
from lightning_longctx.sequence.documents import document_positions
from lightning_longctx.strategy.gradients.norms import gradient_norm, whole

DECODER = DecoderConfig(vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2)
STEPS, LENGTH = 20, 512


@dataclass(frozen=True)
class Run:
    """One training run. Runs that differ only in degrees, layout, communication or sharding must give the same numbers.

    ``documents`` packs every sample: ``alike`` in the same way, ``unlike`` each in its own. ``dropout`` is attention's,
    a third of it the states'; ``recompute`` checkpoints every block of the decoder, which must not change a bit either.
    What ``checkpointing`` keeps must not, either. ``quickstart`` has the shape of that recipe's model.
    """

    degrees: dict[str, Any] = field(default_factory=dict, hash=False)
    layout: str = "zigzag"
    accumulate: int = 1
    optimizer: str = "adamw"
    plain: bool = False
    sharding: str = "replicate"
    clip: float | None = None
    steps: int = STEPS
    length: int = LENGTH
    global_batch: int = 2
    documents: Literal["none", "alike", "unlike"] = "none"
    windows: tuple[int | None, ...] = (None,)
    sinks: bool = False
    communication: Communication = Communication()
    dropout: float = 0.0
    softcap: float | None = None
    recompute: bool = field(default=False, hash=False)
    checkpointing: Checkpointing = field(default=Checkpointing(), hash=False)
    vocab: int = DECODER.vocab_size
    tied: bool = False
    qk_norm: bool = False
    precision: str = "32-true"
    quickstart: bool = False
    shard_ranks: int | Literal["auto"] = "auto"


@dataclass
class Result:
    """Per step the loss over all tokens and the norm of all gradients; the weights at the end, by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


class PlainLM(LightningModule):
    """Inherits nothing from the package, calls PyTorch's attention, and returns the mean over its own labels."""

    def __init__(self, optimizer: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(DECODER.vocab_size, DECODER.width)
        self.positions = nn.Embedding(LENGTH, DECODER.width)
        # No bias: softmax does not feel the keys', so its gradient is rounding, which AdamW turns into whole steps.
        self.qkv = nn.ModuleList(nn.Linear(DECODER.width, 3 * DECODER.width, bias=False) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Linear(DECODER.width, DECODER.width) for _ in range(2))
        self.head = nn.Linear(DECODER.width, DECODER.vocab_size)
        self.make_optimizer = optimizer

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.embedding(batch["input_ids"]) + self.positions(batch["position_ids"])
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            normed = F.layer_norm(states, states.shape[-1:])
            query, key, value = qkv(normed).unflatten(-1, (3, DECODER.num_heads, -1)).permute(2, 0, 3, 1, 4)
            dropout = self.dropout if self.training else 0.0
            found = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
            states = states + F.gelu(mlp(found.transpose(1, 2).flatten(2)))
        return self.head(states)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch).flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class Recorder(Callback):
    """Loss of each optimizer step over all tokens of its window, and norm of all gradients before clipping."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.window = torch.zeros(2, dtype=torch.float64)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        # Lightning hands over the step's own loss: the mean over this rank's tokens (NaN where there are none).
        count = (batch["shift_labels"] != -100).sum()
        loss = outputs["loss"].detach().double() * trainer.accumulate_grad_batches
        self.window += torch.stack([torch.where(count > 0, loss * count, 0.0), count.double()])
        if trainer.fit_loop._should_accumulate():
            return
        total, tokens = trainer.strategy.sum_over_tokens(self.window).tolist()
        self.losses.append(total / tokens)
        self.window.zero_()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.norms.append(float(gradient_norm(module.parameters())))


def samples(run: Run) -> list[dict[str, Tensor]]:
    """Random tokens; few labels count, most of them early in a sequence, so that some ranks have many and some none."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(run.steps * run.accumulate * run.global_batch):
        tokens = torch.randint(run.vocab, (run.length,), generator=generator)
        labels = tokens.clone()
        labels[torch.rand(run.length, generator=generator) > torch.linspace(0.9, 0.05, run.length)] = -100
        if index % 3 == 0:
            labels[run.length // 8 :] = -100
        made.append({"input_ids": tokens, "labels": labels})
        if run.documents != "none":
            made[-1]["position_ids"] = packed_positions(run.length, 0 if run.documents == "alike" else index)
    return made


def packed_positions(length: int, seed: int) -> Tensor:
    """Positions of documents of very different lengths, from one token to more than half of the sample."""
    generator = torch.Generator().manual_seed(seed)
    share = 0.1 if seed % 2 else 0.7
    lengths, left = [1, int(share * length)], length - 1 - int(share * length)
    while left:
        lengths.append(int(torch.randint(1, min(left, 60) + 1, (), generator=generator)))
        left -= lengths[-1]
    return torch.from_numpy(document_positions(lengths))


def optimizer(run: Run) -> Any:
    if run.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=1e-3)
    return partial(torch.optim.SGD, lr=0.1)


def train(run: Run) -> Result:
    """Fit on this rank's part of the world."""
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))  # replicas must agree whatever the seeds
    degrees = Degrees(**run.degrees).resolve(dist.get_world_size())
    config = replace(DECODER, width=128, num_layers=3) if run.quickstart else DECODER
    config = replace(config, windows=run.windows, sinks=run.sinks, softcap=run.softcap)
    config = replace(config, vocab_size=run.vocab, tie_embeddings=run.tied, qk_norm=run.qk_norm)
    config = replace(config, attention_dropout=run.dropout, dropout=run.dropout / 3)
    module = PlainLM(optimizer(run), run.dropout) if run.plain else CausalLM(config, optimizer(run))
    torch.manual_seed(1)
    if isinstance(module, CausalLM):
        module.decoder = Decoder(config)
        for block in module.decoder.blocks if run.recompute else ():
            checkpoint(block)
        for name, weight in module.named_parameters():
            if name.endswith("sinks"):
                nn.init.normal_(weight)  # of the size of logits: at 0 a sink forgotten in backward would look right
    else:
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=LongContextStrategy(
            degrees,
            run.layout,  # type: ignore[arg-type]
            run.communication,
            sharding=run.sharding,  # type: ignore[arg-type]
            sharding_options=ShardingOptions(run.shard_ranks),
            checkpointing=run.checkpointing,
        ),
        max_steps=run.steps,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip,
        precision=run.precision,  # type: ignore[arg-type]
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(samples(run), batch_size=run.global_batch // degrees.data, shuffle=True))
    weights = {name: whole(weight.detach()).clone() for name, weight in module.named_parameters()}
    return Result(recorder.losses, recorder.norms, weights)


def train_all(runs: list[Run]) -> list[Result]:
    """Several runs in one call; only rank 0's results travel back (the test of agreement is ``train``'s own)."""
    results = [train(run) for run in runs]
    return results if dist.get_rank() == 0 else []


def distance(result: Result, exact: Result) -> float:
    """2-norm of the difference of all weights."""
    return float(torch.stack([(result.weights[name] - exact.weights[name]).norm() for name in exact.weights]).norm())
