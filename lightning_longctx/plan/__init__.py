"""What must be done: masks, tiles, parcels, schedules and their cost.

Pure: the collate worker, the engine and the tests read the same plan.
"""

from lightning_longctx.plan.attention import AttentionPlan
from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.schedules import DoubleRing
from lightning_longctx.plan.steps import Hop, Schedule, Step
from lightning_longctx.plan.tiles import Tile, plan_tiles

__all__ = [
    "CAUSAL",
    "AttentionPlan",
    "Communication",
    "DoubleRing",
    "Hop",
    "Mask",
    "Schedule",
    "Step",
    "Tile",
    "plan_attention",
    "plan_tiles",
]
