"""How a batch is cut: next-token labels, shards, and the collate function that makes them."""

from lightning_longctx.batch.collate import ShardCollate, ensure_sharded
from lightning_longctx.batch.labels import IGNORE, count_valid, shift_labels
from lightning_longctx.batch.shard import shard_batch
from lightning_longctx.batch.sharding import LayoutOption, Sharding

__all__ = [
    "IGNORE",
    "LayoutOption",
    "ShardCollate",
    "Sharding",
    "count_valid",
    "ensure_sharded",
    "shard_batch",
    "shift_labels",
]
