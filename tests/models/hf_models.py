"""Tiny random models of transformers for the tests beside this file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_longctx.models.hugging_face.files import build_model, read_config
from lightning_longctx.sequence import SequenceRecord

SHAPE: dict[str, Any] = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    initializer_range=0.3,
    pad_token_id=None,
)


def tiny(model_type: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    return build_model(None, read_config(SHAPE | {"model_type": model_type} | more, {}), "float32").eval()


def tokens(length: int, rows: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.arange(length).expand(rows, -1)}


SPREAD = SequenceRecord(length=8, layout="zigzag", num_ranks=2)
PACKED = SequenceRecord(length=8, documents=(0, 3, 8))
