"""The steps of a language model that learns to predict the next token, whatever its layers are."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longctx.loss import TiledLoss, token_cross_entropy
from lightning_longctx.mixins.long_context import LongContextMixin
from lightning_longctx.strategy import LongContextStrategy


class NextTokenMixin(LongContextMixin):
    """Training, validation, test and prediction of a module that defines ``next_token_logits``.

    Logs ``train_loss`` per optimizer step, ``val_loss``, ``val_perplexity``, ``test_loss`` and ``test_perplexity`` per
    epoch: means over all tokens of all ranks, in nats.

    Args:
        *args: For the next class.
        optimizer: Makes the optimizer from the module's parameters, such as ``torch.optim.AdamW``.
        lr_scheduler: Makes the learning rate's schedule from the optimizer; stepped once per optimizer step.
        **kwargs: For the next class.
    """

    def next_token_logits(self, batch: dict[str, Any]) -> Tensor:
        """What the module must define: logits [B, s, vocab_size] of this rank's tokens.

        Of tensor ranks they may be a DTensor that is cut over the vocabulary.
        """
        raise TypeError(f"{type(self).__name__} must define next_token_logits(batch): logits [B, s, vocab_size].")

    def next_token_loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Cross entropy summed over this rank's labels that count, and how many those are: of training and evaluation.

        The default is that of ``next_token_logits``. A module whose logits are a plain product may override it so that
        they never exist whole:

            return linear_cross_entropy(states, self.head.weight, batch["shift_labels"])

        (``from lightning_longctx.loss import linear_cross_entropy``).
        """
        return token_cross_entropy(self.next_token_logits(batch), batch["shift_labels"])

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        """Mean loss over this rank's tokens."""
        total, count = self.next_token_loss(batch)
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
        logits = self.next_token_logits(batch)
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return {"tokens": whole.argmax(dim=-1), "position_ids": batch["position_ids"]}

    def _log_evaluation(self, stage: str, batch: dict[str, Any]) -> None:
        total, count = self.next_token_loss(batch)
        self.log_tokens(f"{stage}_loss", total, count, prog_bar=True)
        self.log_tokens(f"{stage}_perplexity", total, count, exponentiate=True)


def check_loss(loss: TiledLoss, trainer: Trainer) -> None:
    """Check that a loss can be computed in a run, before it begins.

    Raises:
        ValueError: Its kernel cannot run there.
    """
    strategy = trainer.strategy
    num_tensor_ranks = strategy.degrees.tensor if isinstance(strategy, LongContextStrategy) else 1
    loss.check(strategy.root_device, num_tensor_ranks)
