"""From a layout and a mask to the plan of one attention call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_longctx.plan.counts import ring_tokens
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.plan.needs import Pieces, wanted_pieces
from lightning_longctx.plan.schedules import DoubleRing, Schedule, Step
from lightning_longctx.plan.tiles import Tile, plan_tiles
from lightning_longctx.sequence.layout import LayoutName, Ranges, layout_ranges


@dataclass(frozen=True)
class AttentionPlan:
    """Everything one rank does in one attention call: the engine, the planner and the tests read the same plan.

    Args:
        rank: Position on the context axes.
        shards: Every rank's ranges of global positions.
        mask: Who may see whom.
        ring: The message tables.
    """

    rank: int
    shards: tuple[Ranges, ...]
    mask: Mask
    ring: DoubleRing

    @cached_property
    def forward(self) -> Schedule:
        """Steps of the forward pass."""
        return self.ring.schedule(self.rank, backward=False)

    @cached_property
    def backward(self) -> Schedule:
        """Steps of the backward pass."""
        return self.ring.schedule(self.rank, backward=True)

    @cached_property
    def _tiles(self) -> dict[tuple[int, Pieces], tuple[Tile, ...]]:
        return {}

    def tiles(self, step: Step) -> tuple[Tile, ...]:
        """Work of one step; key indices count along the step's pieces, joined."""
        key = (step.home, step.pieces)
        if key not in self._tiles:
            pieces = tuple(self.shards[step.home][piece] for piece in step.pieces)
            self._tiles[key] = plan_tiles(self.shards[self.rank], pieces, self.mask) if pieces else ()
        return self._tiles[key]


@lru_cache(maxsize=256)
def plan_attention(
    length: int, layout: LayoutName, num_ranks: int, inner: int, rank: int, mask: Mask = CAUSAL
) -> AttentionPlan:
    """The cheaper of the two ring directions: one pure function, so all ranks agree without talking."""
    shards = layout_ranges(layout, length, num_ranks)
    return AttentionPlan(rank, shards, mask, cheapest_ring(shards, inner, mask))


@lru_cache(maxsize=64)
def cheapest_ring(shards: tuple[Ranges, ...], inner: int, mask: Mask) -> DoubleRing:
    """Try both directions and keep the one that sends fewer tokens.

    Zigzag under a causal mask prefers earlier ranks (-1): a later rank's block is wanted whole there, and only half of
    it after the wrap. Contiguous prefers later ranks, where chains end at the last rank.
    """
    needs = wanted_pieces(shards, mask)
    num_pieces = max((len(ranges) for ranges in shards), default=0)
    windows = len(shards) // inner
    rings = [DoubleRing(windows, inner, needs, num_pieces, direction) for direction in (-1, 1)]
    return min(rings, key=lambda ring: ring_tokens(ring, shards))
