"""Runs of ``HuggingFaceModule``, for the ranks of a pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_longctx.mixins import HuggingFaceModule
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.topology import Degrees
from tests.mixins.modules import SGD, Recorder, share
from tests.strategy.runs import QUIET

CONFIG: dict[str, Any] = dict(
    model_type="qwen3",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    tie_word_embeddings=True,
    pad_token_id=None,
)


def fit(
    model: Any, degrees: Degrees, save_to: str | None = None, sharding: str = "replicate", **more: Any
) -> tuple[list[float], list[dict[str, float]], float]:
    """Train on 4 samples, and save; losses of the steps, validation metrics, and the loss of a validation after."""
    torch.manual_seed(3 + dist.get_rank())
    module, recorder = HuggingFaceModule(model, save_to=save_to, optimizer=SGD, **more), Recorder()
    trainer = Trainer(
        strategy=LongContextStrategy(degrees, sharding=sharding),  # type: ignore[arg-type]
        devices=dist.get_world_size(),
        max_epochs=1,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,
        callbacks=[recorder],
        **QUIET,
    )
    trainer.fit(module, share(4, degrees), share(4, degrees, seed=1))
    after = trainer.validate(module, share(4, degrees, seed=1), verbose=False)
    return recorder.steps, recorder.validations, after[0]["val_loss"]
