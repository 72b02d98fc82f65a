"""What the tests of this room share: masks, packed rows, and which pairs tiles cover."""

from itertools import accumulate

import numpy as np
from hypothesis import strategies as st

from lightning_longctx.plan.mask import Mask

MASKS = st.one_of(st.just(Mask()), st.just(Mask(causal=False)), st.integers(1, 60).map(lambda w: Mask(window=w)))
PACKED = st.one_of(
    st.integers(0, 50).map(lambda length: (length, ())),
    st.lists(st.sampled_from([1, 1, 2, 5, 9, 20]), min_size=1, max_size=6).map(
        lambda lengths: (sum(lengths), tuple(accumulate(lengths, initial=0)))
    ),
)
"""``(length, cumulative document lengths)``."""


def covered(tiles, num_queries, num_keys):
    """How often each pair of local indices is covered."""
    count = np.zeros((num_queries, num_keys), dtype=int)
    for tile in tiles:
        offset = np.arange(tile.num_keys) - np.arange(tile.num_queries)[:, None]
        count[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += (tile.lo < offset) & (offset <= tile.hi)
    return count


def held(pieces):
    """``(position, document)`` of every token, in local order."""
    return [(position, piece.document) for piece in pieces for position in piece.positions]
