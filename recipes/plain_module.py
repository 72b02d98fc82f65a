"""A LightningModule that knows nothing of this package, and still trains on cut sequences.

Three habits make it so: it asks `F.scaled_dot_product_attention(..., is_causal=True)` for attention, it takes positions
from the batch's `position_ids`, and it compares with the batch's `shift_labels`. Its loss is the usual mean over the
labels it has; the strategy weighs the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and MLP, each added to the stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Carry states [B, T, width] through one layer."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class PlainModule(LightningModule):
    """A GPT with learned positions.

    Args:
        vocab_size: Number of token ids.
        max_tokens: Longest sequence.
        width: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Attention heads; divides ``width``.
        lr: AdamW's learning rate.
    """

    def __init__(
        self,
        vocab_size: int = 257,
        max_tokens: int = 4096,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.lr = lr
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_tokens, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Mean cross entropy over the labels of this rank."""
        states = self.blocks(self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"]))
        return F.cross_entropy(self.head(states).flatten(0, 1), batch["shift_labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", self(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
