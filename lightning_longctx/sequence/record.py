"""The ``sequence`` entry of a batch: everything attention must know about where tokens live."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.layout import LAYOUTS, LayoutName, layout_ranges
from lightning_longctx.sequence.ranges import Ranges, cut

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SequenceRecord:
    """How one batch's sequences are cut over the context and head ranks.

    Plain values: hashable, picklable, and but for ``rank``, ``head_rank`` and ``tensor_rank`` the same on all ranks.

    Args:
        length: Length of a row in tokens, padding included; one for all rows of the batch.
        layout: Which layout cut it.
        num_ranks: Context ranks.
        inner_ring: Context ranks in one inner ring.
        rank: Position of the holder on the context axes (window-major).
        head: Head ranks, which hold equal parts of a context rank's shard, in its local order.
        head_rank: Position of the holder among them.
        tensor: Tensor ranks, which hold the same tokens, each for its part of every matrix (and of the heads).
        tensor_rank: Position of the holder among them.
        documents: Cumulative lengths of packed documents, ``(0, ..., total)``; empty if a row is one document.
        num_rows: 1 if all rows of the batch have the same documents, which then count along one row. Otherwise the rows
            are taken one after another as one long sequence, along which ``documents`` count.
        padded: Whether some rows end in tokens that are no content.
        row_lengths: Highest position of every row plus one, padding left out (one entry if rows agree): the length by
            which rotary positions are scaled. The same for all degrees, unlike ``length``. Empty if positions are not
            [B, S].
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
    head: int = 1
    head_rank: int = 0
    tensor: int = 1
    tensor_rank: int = 0
    documents: Documents = ()
    num_rows: int = 1
    padded: bool = False
    row_lengths: tuple[int, ...] = ()
    num_valid_tokens: int = -1
    checksum: int = 0
    ring: str = ""
    backend: str = "auto"
    _prepared: tuple[torch.Tensor, int] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def shards(self) -> tuple[Ranges, ...]:
        """Every context rank's ranges of positions, over ``num_rows * length`` positions."""
        return layout_ranges(self.layout, self.length, self.num_ranks, self.documents, self.num_rows)

    @property
    def ranges(self) -> Ranges:
        """The positions this rank holds: its part of its context rank's shard, row by row."""
        shard = self.shards[self.rank]
        per_row = sum(map(len, shard)) // self.num_rows
        size = per_row // self.head
        starts = (row * per_row + self.head_rank * size for row in range(self.num_rows))
        return tuple(piece for start in starts for piece in cut(shard, start, start + size))

    @property
    def row_ranges(self) -> tuple[Ranges, ...]:
        """The same within each row: one entry that holds for all rows, or ``num_rows`` entries."""
        held, size = self.ranges, self.num_local_tokens
        rows = (cut(held, row * size, (row + 1) * size) for row in range(self.num_rows))
        return tuple(
            tuple(range(p.start - row * self.length, p.stop - row * self.length, p.step) for p in ranges)
            for row, ranges in enumerate(rows)
        )

    @property
    def num_local_tokens(self) -> int:
        """Tokens of each row that this rank holds."""
        if self._prepared is not None:
            return self._prepared[1]
        return sum(map(len, self.shards[self.rank])) // self.num_rows // self.head

    def to(self, *args: Any, **kwargs: Any) -> SequenceRecord:
        """Return self: Lightning moves a batch by calling ``.to`` on its entries, and this one has no device."""
        return self

    def encode(self) -> torch.Tensor:
        """What attention plans from as one CPU int64 tensor: so it enters a custom op, which takes no objects."""
        if self._prepared is not None:
            return self._prepared[0]
        import torch

        layout = LAYOUTS.index(self.layout)
        numbers = (self.length, layout, self.num_ranks, self.inner_ring, self.rank, self.num_rows, *self.documents)
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def prepare(self) -> None:
        """Compute now what every attention call asks: compiled graphs then take it as an input.

        Otherwise they take documents for constants, and are compiled again for every batch that has others.
        """
        object.__setattr__(self, "_prepared", (self.encode(), self.num_local_tokens))

    @staticmethod
    def decode(code: torch.Tensor, ring: str = "", backend: str = "auto") -> SequenceRecord:
        """Inverse of ``encode``, up to head and tensor ranks, padding, row lengths, token count and checksum."""
        length, layout, num_ranks, inner_ring, rank, num_rows, *documents = code.tolist()
        return SequenceRecord(
            length,
            LAYOUTS[layout],  # type: ignore[arg-type]
            num_ranks,
            inner_ring,
            rank,
            documents=tuple(documents),
            num_rows=num_rows,
            ring=ring,
            backend=backend,
        )
