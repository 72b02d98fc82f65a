"""The ``sequence`` entry of a batch: everything attention must know about where tokens live."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lightning_longctx.sequence.layout import LAYOUTS, LayoutName, Ranges, layout_ranges

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SequenceRecord:
    """How one batch's sequences are cut over the context ranks.

    Plain values: hashable, picklable, and but for ``rank`` the same on all ranks.

    Args:
        length: Global length in tokens, padding included; one for all rows of the batch.
        layout: Which layout cut it.
        num_ranks: Context ranks.
        inner_ring: Context ranks in one inner ring.
        rank: Position of the holder on the context axes (window-major).
        num_valid_tokens: Labels that count towards the loss, in the whole batch before it was cut; -1 if the batch
            has no labels.
        checksum: Of the whole batch's tokens: ranks that share a sequence must have cut the same one.
        ring: Name of the transport that joins the ranks (see ``attention.transport``); empty for a single rank.
        backend: Which attention backend computes a tile; ``auto`` asks the registry.
    """

    length: int
    layout: LayoutName = "contiguous"
    num_ranks: int = 1
    inner_ring: int = 1
    rank: int = 0
    num_valid_tokens: int = -1
    checksum: int = 0
    ring: str = ""
    backend: str = "auto"

    @property
    def shards(self) -> tuple[Ranges, ...]:
        """Every rank's ranges of global positions."""
        return _shards(self.layout, self.length, self.num_ranks)

    @property
    def ranges(self) -> Ranges:
        """This rank's ranges of global positions."""
        return self.shards[self.rank]

    @property
    def num_local_tokens(self) -> int:
        """Tokens this rank holds."""
        return sum(map(len, self.ranges))

    def to(self, *args: Any, **kwargs: Any) -> SequenceRecord:
        """Return self: Lightning moves a batch by calling ``.to`` on its entries, and this one has no device."""
        return self

    def encode(self) -> torch.Tensor:
        """The layout as one CPU int64 tensor: the form in which it enters a custom op, which takes no objects."""
        import torch

        layout = LAYOUTS.index(self.layout)
        return torch.tensor([self.length, layout, self.num_ranks, self.inner_ring, self.rank], dtype=torch.int64)

    @staticmethod
    def decode(code: torch.Tensor, ring: str = "", backend: str = "auto") -> SequenceRecord:
        """Inverse of ``encode``, up to token count and checksum."""
        length, layout, num_ranks, inner_ring, rank = code.tolist()
        return SequenceRecord(length, LAYOUTS[layout], num_ranks, inner_ring, rank, ring=ring, backend=backend)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _shards(layout: LayoutName, length: int, num_ranks: int) -> tuple[Ranges, ...]:
    return layout_ranges(layout, length, num_ranks)
