"""Small modules, data and a hand-written training loop that the strategy is compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCAB, WIDTH, HEADS, LENGTH = 32, 16, 4, 16
LEARNING_RATE = 0.1


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        heads = self.qkv(self.norm(states)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        return states + self.dropout(self.mix(found.transpose(1, 2).flatten(2)))


class Plain(LightningModule):
    """Inherits nothing from the package; has parameters of its own beside layers.

    Args:
        style: ``self`` calls ``self(...)`` in the step, ``layers`` its layers, ``manual`` optimises by hand, ``masked``
            averages by hand.
        tied: Use the embedding as the head.
        dropout: In the blocks.
    """

    def __init__(self, style: str = "self", tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.style = style
        self.automatic_optimization = style != "manual"
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(64, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        states = self.embedding(input_ids) + self.positions[position_ids]
        for block in self.blocks:
            states = block(states)
        return self.head(states) * self.scale

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        run = self.forward if self.style == "layers" else self
        logits = run(batch["input_ids"], batch["position_ids"])
        logits, labels = logits.flatten(0, 1).float(), batch["shift_labels"].flatten()
        loss = F.cross_entropy(logits, labels)
        if self.style == "masked":
            valid = labels != -100
            losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
            loss = 0.5 * ((losses * valid).sum() / valid.sum()) + 0.5 * losses[valid].mean()
        if self.style == "manual":
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: dict[str, Any]) -> None:
        self(batch["input_ids"], batch["position_ids"])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def samples(count: int, length: int = LENGTH, seed: int = 0) -> list[dict[str, Tensor]]:
    """Samples whose numbers of valid labels differ; most are at the front, so that shards differ too."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        tokens = torch.randint(VOCAB, (length,), generator=generator)
        labels = tokens.clone()
        labels[3 + 2 * index % (length - 3) :] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def loader(count: int, batch_size: int = 1, length: int = LENGTH) -> DataLoader:
    return DataLoader(samples(count, length), batch_size=batch_size)  # type: ignore[arg-type]


def by_hand(module: Plain, windows: list[list[dict[str, Tensor]]]) -> tuple[list[float], list[float]]:
    """Train in the most direct way: a window is one step on the mean of all its tokens. Returns losses and norms."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for window in windows:
        total, count = torch.zeros(()), 0
        for sample in window:
            tokens = sample["input_ids"][None]
            labels = sample["labels"][1:]
            logits = module(tokens, torch.arange(tokens.shape[1])[None])[0, :-1]
            total = total + F.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])))
        losses.append(float(total.detach()) / count)
        optimizer.step()
    return losses, norms


def windows_of(made: list[dict[str, Tensor]], size: int) -> list[list[dict[str, Tensor]]]:
    """Samples in optimizer steps; the last may be short."""
    return [made[start : start + size] for start in range(0, len(made), size)]
