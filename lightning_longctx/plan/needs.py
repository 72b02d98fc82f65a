"""Which pieces of whose keys each rank's queries see. A *piece* is one range of a layout: the unit that is sent."""

from __future__ import annotations

from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.tiles import plan_tiles
from lightning_longctx.sequence.layout import Ranges

Pieces = tuple[int, ...]
"""Ascending indices into the ranges of one home rank."""

Needs = tuple[tuple[Pieces, ...], ...]
"""``needs[rank][home]``: the pieces of ``home`` that ``rank`` has work with."""


def wanted_pieces(shards: tuple[Ranges, ...], mask: Mask) -> Needs:
    """Ask the band planner, piece by piece, whether a rank has any work with it."""
    return tuple(
        tuple(
            tuple(
                index for index, piece in enumerate(home) if any(plan_tiles((query,), (piece,), mask) for query in rank)
            )
            for home in shards
        )
        for rank in shards
    )
