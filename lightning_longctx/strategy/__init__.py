"""The Lightning seam: the strategy, what it does to loaders, parameters, gradients and checkpoints."""

from lightning_longctx.strategy.parameters.sharding_options import ShardingOptions
from lightning_longctx.strategy.strategy import LongContextStrategy

__all__ = ["LongContextStrategy", "ShardingOptions"]
