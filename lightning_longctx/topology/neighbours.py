"""Which global ranks form a group on which axes. Pure: no process group is needed to ask."""

from __future__ import annotations

import numpy as np

from lightning_longctx.topology.degrees import AXES, Degrees

CONTEXT = ("context_outer", "context_inner")
LOSS = ("data", "context_outer", "context_inner", "head")
"""Axes that split tokens: gradients and losses are summed over them."""


def axis_groups(degrees: Degrees, *axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups of *global* ranks that differ only on ``axes``, each in the order of ``degrees.axes``: ascending.

    Window-major: on the two context axes a group lists window 0's ranks, then window 1's, whatever the placement. Never
    use a position in such a group as a peer for point-to-point calls without looking the global rank up here.
    """
    unknown = set(axes) - set(AXES)
    if unknown:
        raise ValueError(f"unknown axes {sorted(unknown)}; the axes are {AXES}.")
    inside = [index for index, axis in enumerate(degrees.axes) if axis in axes]
    outside = [index for index, axis in enumerate(degrees.axes) if axis not in axes]
    ranks = np.arange(np.prod(degrees.shape)).reshape(degrees.shape).transpose(*outside, *inside)
    size = int(np.prod([degrees.shape[index] for index in inside]))
    return tuple(tuple(int(rank) for rank in group) for group in ranks.reshape(-1, size))


def group_of(degrees: Degrees, rank: int, *axes: str) -> tuple[int, ...]:
    """The group on ``axes`` that global ``rank`` belongs to."""
    return next(group for group in axis_groups(degrees, *axes) if rank in group)


def axis_rank(degrees: Degrees, rank: int, *axes: str) -> int:
    """Position of global ``rank`` in its group on ``axes``."""
    return group_of(degrees, rank, *axes).index(rank)
