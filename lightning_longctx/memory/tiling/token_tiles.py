"""Which tokens run together, and where their results go."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenTiles:
    """How the tokens of one call are cut.

    Where tensor ranks gather tokens in front of a module and scatter them behind it, rank ``r`` gets the ``r``-th part
    of what the module returns. A tile must therefore take the same tokens of every part: what is scattered of it is
    then a range of each rank's own tokens.

    Args:
        num_tokens: T, of all parts together; ``num_ranks`` must divide it.
        tile_tokens: How many of them to run at a time, at least 1. Every part is in every tile, so that it can be
            ``num_ranks - 1`` tokens fewer, or ``num_ranks`` if that is more.
        num_ranks: Parts.
    """

    num_tokens: int
    tile_tokens: int
    num_ranks: int = 1

    @property
    def part_tokens(self) -> int:
        """How many tokens a part has."""
        return self.num_tokens // self.num_ranks

    @property
    def spans(self) -> tuple[range, ...]:
        """The tokens of each tile as numbers within a part, in order; an empty one where there are no tokens."""
        step = max(1, self.tile_tokens // self.num_ranks)
        starts = range(0, max(1, self.part_tokens), step)
        return tuple(range(start, min(start + step, self.part_tokens)) for start in starts)

    def take(self, whole: Tensor, span: range) -> Tensor:
        """The tile [B, num_ranks * len(span), ...] of a tensor [B, T, ...], or [B, len(span), ...] of [B, T / n, ...].

        Args:
            whole: Tokens of all parts, or of one.
            span: From ``spans``.

        Returns:
            Contiguous, or ``F.linear`` would add its bias in a second rounding; a view where that is one.
        """
        return self._parts(whole)[:, :, span.start : span.stop].flatten(1, 2).contiguous()

    def put(self, whole: Tensor, span: range, tile: Tensor) -> None:
        """Write what ``take`` takes; ``whole`` must be contiguous."""
        parts = self._parts(whole)
        parts[:, :, span.start : span.stop].copy_(tile.unflatten(1, (parts.shape[1], len(span))))

    def _parts(self, whole: Tensor) -> Tensor:
        num_parts = self.num_ranks if whole.shape[1] == self.num_tokens else 1
        return whole.unflatten(1, (num_parts, self.part_tokens))
