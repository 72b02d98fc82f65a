"""How every batch of a run is cut, as one value that travels to the workers of a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_longctx.batch.entries import LABELS, TOKENS
from lightning_longctx.plan.layouts import choose_layout
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.documents import Documents
from lightning_longctx.sequence.layout import LAYOUTS, LayoutName
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.topology.links import Links

LayoutOption = Literal["auto", "contiguous", "zigzag", "striped", "document_zigzag", "balanced"]
"""A layout for all batches, or ``auto``: for each batch the one that promises to be the fastest."""

SETTLED = {"sequence_dims": (*TOKENS, *LABELS), "pad_values": (*LABELS, "position_ids")}
"""Entries that an option may not change: how they are cut and padded follows from what they mean."""


@dataclass(frozen=True)
class Sharding:
    """How every batch of a loader is cut. Plain values, so that it travels to spawned workers.

    Args:
        layout: Which layout cuts sequences; ``auto`` chooses for every batch (see ``plan.layouts``).
        num_ranks: Context ranks.
        inner_ring: Context ranks in one inner ring.
        rank: This process's position on the context axes.
        multiple: Sequences are padded at the tail to a multiple of this (see ``sequence.layout.padding_multiple``).
        ring: Name of the transport that joins the ranks.
        backend: Which attention backend computes a tile.
        sequence_dims: (entry, dim) for entries whose sequence dim cannot be told from the shape; a negative dim counts
            from the end, ``None`` leaves the entry whole.
        pad_values: (entry, value) for entries that are not padded with 0.
        head: Head ranks, which share a context rank's tokens outside attention.
        head_rank: This process's position among them.
        tensor: Tensor ranks, which all get the same tokens.
        tensor_rank: This process's position among them.
        masks: The attention masks of the model's layers: what ``auto`` counts with.
        links: Speeds that ``auto`` counts with.

    Raises:
        ValueError: An unknown layout, a rank outside ``num_ranks``, ``head`` or ``tensor``, a multiple below 1, or an
            option for an entry that is not free to be set.
    """

    layout: LayoutOption = "contiguous"
    num_ranks: int = 1
    inner_ring: int = 1
    rank: int = 0
    multiple: int = 1
    ring: str = ""
    backend: str = "auto"
    sequence_dims: tuple[tuple[str, int | None], ...] = ()
    pad_values: tuple[tuple[str, int], ...] = ()
    head: int = 1
    head_rank: int = 0
    tensor: int = 1
    tensor_rank: int = 0
    masks: tuple[Mask, ...] = (Mask(),)
    links: Links = Links()

    def __post_init__(self) -> None:
        if self.layout not in ("auto", *LAYOUTS):
            raise ValueError(f"layout={self.layout!r} is unknown; choose auto or one of {', '.join(LAYOUTS)}.")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank={self.rank} is not one of the {self.num_ranks} context ranks.")
        if not 0 <= self.head_rank < self.head:
            raise ValueError(f"head_rank={self.head_rank} is not one of the {self.head} head ranks.")
        if not 0 <= self.tensor_rank < self.tensor:
            raise ValueError(f"tensor_rank={self.tensor_rank} is not one of the {self.tensor} tensor ranks.")
        if self.multiple < 1:
            raise ValueError(f"multiple={self.multiple} must be a positive integer.")
        for option, settled in SETTLED.items():
            if taken := [key for key, _ in getattr(self, option) if key in settled]:
                raise ValueError(f"{option} cannot be set for {taken}: it follows from what they mean. Leave them out.")

    def record(
        self,
        length: int,
        num_valid_tokens: int,
        checksum: int = 0,
        documents: Documents = (),
        num_rows: int = 1,
        padded: bool = False,
        row_lengths: tuple[int, ...] = (),
    ) -> SequenceRecord:
        """The record of a batch whose sequences have ``length`` tokens, padding included; arguments as there."""
        return SequenceRecord(
            length=length,
            layout=self.chosen_layout(length, documents, num_rows),
            num_ranks=self.num_ranks,
            inner_ring=self.inner_ring,
            rank=self.rank,
            head=self.head,
            head_rank=self.head_rank,
            tensor=self.tensor,
            tensor_rank=self.tensor_rank,
            documents=documents,
            num_rows=num_rows,
            padded=padded,
            row_lengths=row_lengths,
            num_valid_tokens=num_valid_tokens,
            checksum=checksum,
            ring=self.ring,
            backend=self.backend,
        )

    def chosen_layout(self, length: int, documents: Documents = (), num_rows: int = 1) -> LayoutName:
        """The layout of a batch; the same on every rank."""
        if self.layout != "auto":
            return self.layout
        if self.num_ranks == 1:
            return "contiguous"
        options = (documents, num_rows, self.masks, self.head, self.links)
        return choose_layout(length, self.num_ranks, self.inner_ring, *options)
