"""A causal language model of transformers with its loss, its logs and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_longctx._upstream import attached_trainer
from lightning_longctx.loss import TiledLoss, token_cross_entropy
from lightning_longctx.mixins.long_context import sum_over_ranks
from lightning_longctx.mixins.next_token import NextTokenMixin, check_loss
from lightning_longctx.models.hugging_face.balance import Balance, balance_loss, balance_of
from lightning_longctx.models.hugging_face.config import attention_head_width, attention_heads, attention_masks
from lightning_longctx.models.hugging_face.files import (
    build_model,
    check_target,
    checkpoint_layers,
    read_config,
    write_model,
)
from lightning_longctx.models.hugging_face.heads import final_states, plain_head
from lightning_longctx.models.hugging_face.tensor_plan import with_cut_logits
from lightning_longctx.models.tensor_plan import TensorPlan
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.record import SequenceRecord


class HuggingFaceModule(NextTokenMixin, LightningModule):
    """A language model of transformers that learns to predict the next token.

    Logs ``train_loss`` per optimizer step, ``val_loss``, ``val_perplexity``, ``test_loss`` and ``test_perplexity`` per
    epoch: means over all tokens of all ranks, in nats. Needs ``pip install transformers``.

    Args:
        model: Name on the Hugging Face hub, or a folder with ``config.json`` and, for a pretrained model, safetensors.
            Or a configuration itself, with its ``model_type``, for random weights.
        pretrained: Load weights. ``null`` does so for a name or a folder, and not for a configuration.
        overrides: Entries of the configuration to change, such as ``rope_parameters`` for longer sequences.
        dtype: Of the weights; ``auto`` is that of the files. Optimizers step in it, so narrow ones lose small steps;
            ``trainer.precision: bf16-mixed`` computes in bfloat16 and keeps float32 weights.
        gradient_checkpointing: Recompute layers in backward instead of keeping what they computed.
        save_to: Folder that the model is written to when training ends, as ``save_pretrained`` does. It must not hold
            anything but an earlier model, which is replaced, nor be the folder that ``model`` names.
        optimizer: Makes the optimizer from the parameters.
        lr_scheduler: Makes the learning rate's schedule from the optimizer; stepped once per optimizer step.
        loss: How logits and their cross entropy are computed in training and evaluation. Logits that are no plain
            product of the last states with the output matrix (softcapping, a scale) are computed whole; so are those
            of a class of your own that overrides ``forward`` or ``next_token_logits``.
    """

    model: Any

    def __init__(
        self,
        model: str | dict[str, Any],
        pretrained: bool | None = None,
        overrides: dict[str, Any] | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32",
        gradient_checkpointing: bool = False,
        save_to: str | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        loss: TiledLoss = TiledLoss(),  # noqa: B008
    ) -> None:
        super().__init__(optimizer=optimizer, lr_scheduler=lr_scheduler)
        self.loss = loss
        self._plain: tuple[Any, nn.Linear | None] | None = None  # of which model, and its head
        if pretrained and isinstance(model, Mapping):
            raise ValueError(
                "pretrained=true with a configuration as model: there are no weights to load. Give model the name or "
                "the folder of the weights and put changes into overrides, or leave pretrained out."
            )
        self.source = model
        self.pretrained = not isinstance(model, Mapping) if pretrained is None else pretrained
        self.overrides = overrides or {}
        self.weights_dtype = dtype
        self.gradient_checkpointing = gradient_checkpointing
        self.save_to = save_to

    @cached_property
    def config(self) -> Any:
        """The model's ``PreTrainedConfig``, with the overrides."""
        return read_config(self.source, self.overrides)

    def configure_model(self) -> None:
        """Build or load the model, once; here and not in ``__init__``, so that the Trainer's precision applies."""
        if self.save_to is not None and self._will_train():
            check_target(Path(self.save_to), self.source)
        if hasattr(self, "model"):
            return
        weights = self.source if self.pretrained and isinstance(self.source, str) else None
        self.model = build_model(weights, self.config, self.weights_dtype)
        if self.gradient_checkpointing:
            checkpoint_layers(self.model)

    @property
    def attention_masks(self) -> tuple[Mask, ...]:
        """The masks of the model's layers."""
        return attention_masks(self.config)

    @property
    def attention_heads(self) -> tuple[int, int] | None:
        """Query heads and key/value heads, which the strategy checks its ``head`` degree against."""
        return attention_heads(self.config)

    @property
    def attention_head_width(self) -> int | None:
        """Width of a head, if the configuration says it: what attention costs, for ``ThroughputCallback``."""
        return attention_head_width(self.config)

    def tensor_parallel_plan(self) -> TensorPlan:
        """The plan that the model carries; logits stay cut over the vocabulary."""
        head = self.model.get_output_embeddings()
        names = {id(part): f"model.{name}" for name, part in self.model.named_modules()}
        return with_cut_logits(super().tensor_parallel_plan(), names.get(id(head), ""))

    def setup(self, stage: str) -> None:
        """Check that the loss can be computed here.

        Raises:
            ValueError: It has a kernel that cannot run.
        """
        check_loss(self.loss, self.trainer)

    def forward(self, batch: dict[str, Any]) -> Any:
        """The model's outputs for this rank's tokens, ``logits`` [B, s, vocab_size] among them."""
        return self._outputs(batch)

    def next_token_logits(self, batch: dict[str, Any]) -> Tensor:
        """The outputs' logits."""
        return self(batch).logits

    def next_token_loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Cross entropy over this rank's tokens and their number; in tiles, so that logits never exist whole."""
        if (head := self._plain_head()) is None:
            return super().next_token_loss(batch)
        return self._tiled(batch, head)[:2]

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        """Mean loss over this rank's tokens, with the balance loss that the model's configuration asks for."""
        balance = balance_of(self.model)
        if balance is None:
            return super().training_step(batch)
        if (head := self._plain_head()) is None:
            outputs = self(batch)
            total, count = token_cross_entropy(outputs.logits, batch["shift_labels"])
        else:
            total, count, outputs = self._tiled(batch, head)
        self.log_tokens("train_loss", total, count, prog_bar=True)
        return self._balanced(total, count, balance, outputs.router_logits, batch["sequence"])

    def on_train_end(self) -> None:
        """Write the model to ``save_to``."""
        if self.save_to is not None:
            self.save_pretrained(self.save_to)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write configuration and weights (safetensors), as ``from_pretrained`` reads them; every rank must call it.

        Args:
            folder: Appears only when it is whole; a model that is there is replaced.

        Raises:
            ValueError: The folder holds something else, also beside a model, or is the one the model comes from.
        """
        check_target(Path(folder), self.source)
        write_model(self.model, Path(folder))

    def _will_train(self) -> bool:
        """Whether training is to come, also where no trainer says what is."""
        trainer = attached_trainer(self)
        return trainer is None or trainer.state.fn in (None, TrainerFn.FITTING)

    def _outputs(self, batch: dict[str, Any], **more: Any) -> Any:
        entries = {name: batch[name] for name in ("input_ids", "position_ids", "sequence")}
        return self.model(**entries, use_cache=False, **more)

    def _tiled(self, batch: dict[str, Any], head: nn.Linear) -> tuple[Tensor, Tensor, Any]:
        """Loss, count and the model's outputs, which have the logits of one token: it always makes some."""
        labels = batch["shift_labels"]
        with final_states(self.model) as found:
            outputs = self._outputs(batch, logits_to_keep=torch.zeros(1, dtype=torch.int64, device=labels.device))
        (states,) = found
        return *self.loss(states, head.weight, labels, head.bias), outputs

    def _plain_head(self) -> nn.Linear | None:
        """The model's output matrix if the loss is to be computed in tiles, and can be; asked once."""
        own = all(
            getattr(type(self), name) is getattr(HuggingFaceModule, name) for name in ("forward", "next_token_logits")
        )
        if not own or not self.loss.is_tiled:
            self.loss.check_whole(type(self).__name__)
            return None
        if self._plain is None or self._plain[0] is not self.model:
            self._plain = self.model, plain_head(self.model)
            if self._plain[1] is None:
                name = type(self.model).__name__
                self.loss.check_whole(name)
                rank_zero_info(f"The logits of {name} are no plain product with a matrix: its loss is not tiled.")
        return self._plain[1]

    def _balanced(
        self, total: Tensor, count: Tensor, balance: Balance, router_logits: Any, record: SequenceRecord
    ) -> Tensor:
        """The loss with a balance loss, which counts all tokens alike: also those of ranks that have no label."""
        if record.padded:
            raise ValueError(
                "output_router_logits=true: the balance loss would count the padding of rows. Give all rows one length "
                "that needs none (see the strategy's degrees and layout), pack documents, or set overrides: "
                "{output_router_logits: false}."
            )
        add_up = partial(sum_over_ranks, self.trainer)
        spread = balance_loss(router_logits, balance, add_up)
        self.log("train_balance_loss", spread.detach(), on_step=True, on_epoch=False, batch_size=1)
        num_labels, num_ranks = add_up(torch.stack([count, torch.ones_like(count)]))
        # Each rank declares all labels, so they are divided by as often as there are ranks.
        return self.token_mean(num_ranks * (total + balance.coefficient * num_labels * spread), num_labels)
