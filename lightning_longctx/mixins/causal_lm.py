"""A ready language model: ``models.Decoder`` with its loss, its logs and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lightning_longctx.loss import token_cross_entropy
from lightning_longctx.mixins.long_context import LongContextMixin
from lightning_longctx.models import Decoder, DecoderConfig
from lightning_longctx.plan.mask import Mask


class CausalLM(LongContextMixin, LightningModule):
    """Llama-style language model that learns to predict the next token.

    Logs ``train_loss`` per optimizer step, ``val_loss``, ``val_perplexity``, ``test_loss`` and ``test_perplexity`` per
    epoch: means over all tokens of all ranks, in nats.

    Args:
        decoder: Shape of the model.
        optimizer: Makes the optimizer from the parameters.
        lr_scheduler: Makes the learning rate's schedule from the optimizer; stepped once per optimizer step.
    """

    decoder: Decoder

    def __init__(
        self,
        decoder: DecoderConfig = DecoderConfig(),  # noqa: B008  frozen
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer=optimizer, lr_scheduler=lr_scheduler)
        self.config = decoder

    def configure_model(self) -> None:
        """Build the decoder, once; here and not in ``__init__``, so that the Trainer's precision and device apply."""
        if not hasattr(self, "decoder"):
            self.decoder = Decoder(self.config)

    @property
    def attention_masks(self) -> tuple[Mask, ...]:
        """The masks of the decoder's layers."""
        return self.config.attention_masks

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Query heads and key/value heads, which the strategy checks its ``head`` degree against."""
        return self.config.num_heads, self.config.num_kv_heads or self.config.num_heads

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Next-token logits [B, s, vocab_size] for this rank's tokens."""
        return self.decoder(batch["input_ids"], batch["position_ids"], batch["sequence"])

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        """Mean loss over this rank's tokens."""
        total, count = self._loss(batch)
        self.log_tokens("train_loss", total, count, prog_bar=True)
        return self.token_mean(total, count)

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log loss and perplexity."""
        self._log_evaluation("val", batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log loss and perplexity."""
        self._log_evaluation("test", batch)

    def predict_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """The likeliest next token after each of this rank's tokens.

        Returns:
            ``tokens`` [B, s] int64 and ``position_ids`` [B, s] int64, the global positions that they follow: ranks
            hold different ones.
        """
        return {"tokens": self(batch).argmax(dim=-1), "position_ids": batch["position_ids"]}

    def _loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return token_cross_entropy(self(batch), batch["shift_labels"])

    def _log_evaluation(self, stage: str, batch: dict[str, Any]) -> None:
        total, count = self._loss(batch)
        self.log_tokens(f"{stage}_loss", total, count, prog_bar=True)
        self.log_tokens(f"{stage}_perplexity", total, count, exponentiate=True)
