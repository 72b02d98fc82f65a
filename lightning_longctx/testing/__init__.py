"""Tools for testing code that runs on many ranks: a gloo pool, an emulated cluster, an oracle, tolerances.

Shipped, as torch.testing is.
"""

from lightning_longctx.testing.cluster import Cluster, ClusterUnavailableError, Place, why_unavailable
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
    "Cluster",
    "ClusterUnavailableError",
    "GlooPool",
    "Nursery",
    "Place",
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
    "why_unavailable",
]
