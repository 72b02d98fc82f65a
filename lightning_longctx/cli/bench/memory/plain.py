"""The recipe's decoder as one would write it for Lightning alone: whole sequences, SDPA, whole logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_longctx.batch import IGNORE
from lightning_longctx.models import DecoderConfig
from lightning_longctx.models.decoder import INIT_STD, MLP, residual_std
from lightning_longctx.models.layers import Embedding, Linear, RMSNorm
from lightning_longctx.models.rope import rotary_angles, rotate

UNKNOWN = ("rope_scaling", "qk_norm", "windows", "sinks", "attention_dropout", "dropout", "softcap")
"""Options of ``DecoderConfig`` that the plain model does without."""


class PlainAttention(nn.Module):
    """Causal attention by ``F.scaled_dot_product_attention``; parameters are named as in ``models.decoder``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_size
        self.query = Linear(config.width, config.num_heads * config.head_size, INIT_STD)
        self.key = Linear(config.width, config.kv_heads * config.head_size, INIT_STD)
        self.value = Linear(config.width, config.kv_heads * config.head_size, INIT_STD)
        self.output = Linear(config.num_heads * config.head_size, config.width, residual_std(config))

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Let every token of ``states`` [B, T, width] attend to itself and earlier ones."""
        query, key, value = (
            project(states).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, *rotary), rotate(key, *rotary)
        # Without grouped heads the flag only forbids kernels.
        grouped = query.shape[1] != key.shape[1]
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.output(found.transpose(1, 2).flatten(2))


class PlainBlock(nn.Module):
    """Attention, then MLP, each on the normalised stream and added to it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = PlainAttention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Carry ``states`` [B, T, width] through one layer."""
        states = states + self.attention(self.attention_norm(states), rotary)
        return states + self.mlp(self.mlp_norm(states))


class PlainDecoder(nn.Module):
    """``models.Decoder`` for whole sequences: the same parameters, the same logits.

    Args:
        config: Shape of the model.

    Raises:
        ValueError: It has an option that this model does without.
    """

    def __init__(self, config: DecoderConfig) -> None:
        check_plain(config)
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width, INIT_STD)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.width, config.vocab_size, INIT_STD)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Next-token logits [B, T, vocab_size] of whole sequences [B, T]."""
        states = self.embedding(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        exact = torch.promote_types(states.dtype, torch.float32)
        rotary = rotary_angles(positions, self.config.head_size, self.config.rope_base, exact)
        for block in self.blocks:
            states = block(states, rotary)
        states = self.norm(states)
        return F.linear(states, self.embedding.weight) if self.head is None else self.head(states)


class PlainCausalLM(LightningModule):
    """``CausalLM`` without this package: for any strategy of Lightning that leaves sequences whole.

    Args:
        decoder: Shape of the model. ``null`` is the default of every option.
        optimizer: Makes the optimizer from the parameters.
        lr_scheduler: Makes the learning rate's schedule from the optimizer; stepped once per optimizer step.
    """

    def __init__(
        self,
        decoder: DecoderConfig | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.config = decoder or DecoderConfig()
        self._make_optimizer, self._make_lr_scheduler = optimizer, lr_scheduler

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Query heads and key/value heads."""
        return self.config.num_heads, self.config.kv_heads

    def configure_model(self) -> None:
        """Build the decoder, once, in the dtype and on the device of the Trainer."""
        if not hasattr(self, "decoder"):
            self.decoder = PlainDecoder(self.config)

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        """Mean loss over the sequence."""
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)  # instead of a copy of almost all logits
        return F.cross_entropy(self.decoder(batch["input_ids"]).flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> Any:
        """The optimizer over all parameters, and its schedule."""
        optimizer = self._make_optimizer(self.parameters())
        if self._make_lr_scheduler is None:
            return optimizer
        schedule: dict[str, Any] = {"scheduler": self._make_lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def check_plain(config: DecoderConfig) -> None:
    """Raise ``ValueError`` if the config has an option that the plain model does without."""
    ordinary = DecoderConfig()
    if other := [name for name in UNKNOWN if getattr(config, name) != getattr(ordinary, name)]:
        raise ValueError(
            f"decoder.{other[0]}={getattr(config, other[0])}: the plain model that budget_gib is compared with does "
            "without. Leave it out of the recipe, or leave budget_gib out."
        )
