"""What a backend promises: attention over tiles, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_longctx.plan.stacks import Span
from lightning_longctx.plan.tiles import Tile

Tiles = tuple[Tile, ...]


@dataclass(frozen=True, eq=False)
class Dropout:
    """Which weights are dropped: a hash of numbers that belong to the query and to the key (``attention.dropout``).

    Args:
        p: Probability; weights that stay are divided by ``1 - p``.
        rows: [B, Hq, Tq, 2] int64, two words below 2^32 for every query row.
        keys: [Tk] int64, global positions of the keys, below 2^32.
    """

    p: float
    rows: Tensor
    keys: Tensor

    def part(self, queries: Span, keys: Span) -> Dropout:
        """Of some queries and keys; neither span counts more than one slice."""
        rows = self.rows.narrow(2, queries.start, queries.size)
        return replace(self, rows=rows, keys=self.keys.narrow(0, keys.start, keys.size))


@dataclass(frozen=True, eq=False)
class Scores:
    """How products of queries and keys become weights.

    Args:
        scale: Factor on ``q . k``.
        softcap: Scores become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv 2408.00118); None leaves them.
        dropout: None drops nothing.
    """

    scale: float
    softcap: float | None = None
    dropout: Dropout | None = None

    def part(self, queries: Span, keys: Span) -> Scores:
        """Of some queries and keys."""
        return self if self.dropout is None else replace(self, dropout=self.dropout.part(queries, keys))


class Needs(NamedTuple):
    """What an attention call asks of a backend."""

    device: torch.device
    dtype: torch.dtype
    width: int
    window: bool = False
    softcap: bool = False
    dropout: bool = False

    def __str__(self) -> str:
        options = [name for name in ("window", "softcap", "dropout") if getattr(self, name)]
        return f"attention of width {self.width} in {self.dtype} on {self.device.type}" + " with ".join(
            ["", " and ".join(options)] if options else []
        )


class Backend(Protocol):
    """Computes tiles: queries [B, Hq, Tq, D], keys and values [B, Hkv, Tk, D]; Hkv divides Hq (grouped heads).

    One that ``takes_tables`` gets all tiles of a step at once, of any place: a query may be in several of them, or in
    none. The others get one tile at a time, which covers the queries and keys that come with it.
    """

    name: str
    takes_tables: bool

    def refusal(self, needs: Needs) -> str | None:
        """Why this backend cannot compute that; None if it can."""
        ...

    def parts(self, tile: Tile, device: torch.device, dtype: torch.dtype, *, backward: bool = False) -> Tiles:
        """Cut a tile into such as this backend computes, and computes fast, in a forward or a backward pass.

        Raises:
            ValueError: It cannot compute the tile's band.
        """
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scores: Scores) -> tuple[Tensor, Tensor]:
        """Softmax over the tiles' keys alone.

        Returns:
            out [B, Hq, Tq, D] in the inputs' dtype, and lse [B, Hq, Tq], the log of the sum of exponentials before
            dropout, in the wide dtype (see ``merge.wide_dtype``). A row that sees no key has out 0 and lse -inf.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of these tiles, given the *final* out and lse of their queries over all keys.

        Returns:
            dq, dk and dv with the shapes of query, key and value; 0 where nothing is seen.
        """
        ...
