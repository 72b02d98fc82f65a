"""What must be done: masks, tiles, needs, schedules and their cost.

Pure: the collate worker, the engine and the tests read the same plan.
"""

from lightning_longctx.plan.choose import AttentionPlan, plan_attention
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.schedules import DoubleRing, Hop, Schedule, Step
from lightning_longctx.plan.tiles import Tile, plan_tiles

__all__ = [
    "CAUSAL",
    "AttentionPlan",
    "DoubleRing",
    "Hop",
    "Mask",
    "Schedule",
    "Step",
    "Tile",
    "plan_attention",
    "plan_tiles",
]
