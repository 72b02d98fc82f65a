"""The plan of one attention call on one rank: messages, and tiles for what they bring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.parcels import ParcelIds
from lightning_longctx.plan.pieces import Pieces, select
from lightning_longctx.plan.schedules import DoubleRing
from lightning_longctx.plan.steps import Schedule, Step
from lightning_longctx.plan.tiles import Tile, plan_tiles


@dataclass(frozen=True)
class AttentionPlan:
    """Everything one rank does in one attention call: the engine, the planner and the tests read the same plan.

    Args:
        rank: Position on the context axes.
        shards: Every rank's pieces.
        mask: Who may see whom.
        ring: The message tables.
    """

    rank: int
    shards: tuple[Pieces, ...]
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
    def _tiles(self) -> dict[tuple[int, ParcelIds], tuple[Tile, ...]]:
        return {}

    def tiles(self, step: Step) -> tuple[Tile, ...]:
        """Work of one step; key indices count along the step's parcels, joined."""
        key = (step.home, step.parcels)
        if key not in self._tiles:
            self._tiles[key] = plan_tiles(self.shards[self.rank], self._keys(step), self.mask)
        return self._tiles[key]

    @property
    def query_ranges(self) -> tuple[range, ...]:
        """Where this rank's queries stand, in local order."""
        return tuple(piece.positions for piece in self.shards[self.rank])

    def key_ranges(self, step: Step) -> tuple[range, ...]:
        """Where the keys of one step stand, along its parcels."""
        return tuple(piece.positions for piece in self._keys(step))

    def _keys(self, step: Step) -> Pieces:
        if step.home == self.rank:
            return self.shards[self.rank]
        parcels = self.ring.parcels[step.home]
        return select(self.shards[step.home], [span for p in step.parcels for span in parcels[p].intervals])
