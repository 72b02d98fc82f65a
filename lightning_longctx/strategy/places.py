"""What follows from a rank's place on the axes: which samples it reads, and which part of each."""

from __future__ import annotations

import os
from dataclasses import replace

from lightning_longctx.batch import Sharding
from lightning_longctx.sequence import padding_multiple
from lightning_longctx.topology import CONTEXT, Degrees, axis_rank


def sampler_place(degrees: Degrees, rank: int, seed: int) -> dict[str, int]:
    """Arguments for a ``DistributedSampler``: only data ranks read different samples, in an order that all agree on."""
    return {"num_replicas": degrees.shape[0], "rank": axis_rank(degrees, rank, "data"), "seed": seed}


def sampler_seed() -> int:
    """The seed that Lightning gives to samplers in this process: that of ``seed_everything``, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def sharding_of_rank(sharding: Sharding, degrees: Degrees, rank: int, ring: str) -> Sharding:
    """Complete a run's sharding for global ``rank``.

    Args:
        sharding: Layout, backend and what the user says about entries.
        degrees: Resolved degrees.
        rank: Global rank.
        ring: Name of the open ring.
    """
    # Uneven shards are fine where nothing but the ring cuts a sequence.
    even = degrees.head * degrees.tensor > 1
    return replace(
        sharding,
        num_ranks=degrees.context,
        inner_ring=degrees.inner,
        rank=axis_rank(degrees, rank, *CONTEXT),
        head=degrees.head,
        head_rank=axis_rank(degrees, rank, "head"),
        tensor=degrees.tensor,
        tensor_rank=axis_rank(degrees, rank, "tensor"),
        multiple=padding_multiple(sharding.layout, degrees.context, degrees.head, degrees.tensor) if even else 1,
        ring=ring,
    )
