"""Tools for testing code that runs on many ranks: a gloo pool, an oracle, tolerances; shipped, as torch.testing is."""

from lightning_longctx.testing.failures import RankError
from lightning_longctx.testing.nursery import Nursery
from lightning_longctx.testing.oracle import attention_oracle, dense_mask, gather_shards, take_shard
from lightning_longctx.testing.poison import poisoned_empty
from lightning_longctx.testing.pool import GlooPool
from lightning_longctx.testing.tolerances import (
    BFLOAT16,
    BFLOAT16_GRAD,
    FLOAT16,
    FLOAT16_GRAD,
    FLOAT32,
    FLOAT32_GRAD,
    FLOAT32_WEIGHTS,
    FLOAT64,
    assert_all_close_relative,
    assert_close_relative,
    relative_error,
    tolerance,
)

__all__ = [
    "BFLOAT16",
    "BFLOAT16_GRAD",
    "FLOAT16",
    "FLOAT16_GRAD",
    "FLOAT32",
    "FLOAT32_GRAD",
    "FLOAT32_WEIGHTS",
    "FLOAT64",
    "GlooPool",
    "Nursery",
    "RankError",
    "assert_all_close_relative",
    "assert_close_relative",
    "attention_oracle",
    "dense_mask",
    "gather_shards",
    "poisoned_empty",
    "relative_error",
    "take_shard",
    "tolerance",
]
