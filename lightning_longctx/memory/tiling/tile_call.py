"""One call of a module in token tiles: what runs, on which tokens, and what its results must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_longctx._upstream import version_of
from lightning_longctx.memory.tiling.token_tiles import TokenTiles


@dataclass(frozen=True)
class TileCall:
    """One call of a tiled module.

    Args:
        module: Whose parameters these are; they are looked up again in backward, when FSDP2 has gathered them anew.
        run: Its forward for one tile.
        tiles: How tokens are cut.
        name: Of the module, for errors.
    """

    module: nn.Module
    run: Callable[[Tensor], Any]
    tiles: TokenTiles
    name: str

    def take(self, states: Tensor, span: range) -> Tensor:
        """One tile of the input, without autograd; a DTensor if that is one."""
        if not isinstance(states, DTensor):
            return self.tiles.take(states, span)
        local = self.tiles.take(states.to_local(), span)
        return DTensor.from_local(local, states.device_mesh, states.placements, run_check=False)

    def trainable(self) -> tuple[nn.Parameter, ...]:
        """The module's parameters that get gradients, each once."""
        return tuple(parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def forward(self, states: Tensor, run: Callable[[Tensor, range], Any] | None = None) -> Tensor:
        """All tiles, one after another, into one tensor; without autograd.

        Args:
            states: [B, T, W].
            run: Runs one tile of a span; ``self.run`` if there is nothing more to it.

        Returns:
            [B, T, W'], or [B, T / n, W'] of this rank where n tensor ranks scatter what the module returns.
        """
        run = run or (lambda taken, _: self.run(taken))
        first, *others = self.tiles.spans
        tile, rows = self._run_checked(run, states, first)
        result = tile.new_empty(states.shape[0], rows, tile.shape[-1])
        self.tiles.put(result, first, tile)
        for span in others:
            tile, rows = self._run_checked(run, states, span)
            if (rows, tile.shape[-1], tile.dtype) != (*result.shape[1:], result.dtype):
                raise ValueError(
                    f"{self.name} returned {tile.dtype} {list(tile.shape)} for one tile of tokens, but "
                    f"{result.dtype} [..., {result.shape[-1]}] for the first. Leave it out of tiles."
                )
            self.tiles.put(result, span, tile)
        return result

    def _run_checked(self, run: Callable[[Tensor, range], Any], states: Tensor, span: range) -> tuple[Tensor, int]:
        """One tile's result, and how many tokens the whole has; raises if anything was written to on the way."""
        taken = self.take(states, span)
        before = self._versions(taken)
        tile = run(taken, span)
        rows = self._rows(tile, states, span)
        if written := next((name for name, count in self._versions(taken).items() if before.get(name) != count), None):
            raise ValueError(
                f"{self.name} writes to {written}, which in tiles would happen several times over, and again in "
                "backward. Leave it out of tiles."
            )
        return tile, rows

    def _rows(self, tile: Any, states: Tensor, span: range) -> int:
        """How many tokens the whole result has."""
        taken, part = self.tiles.num_ranks * len(span), len(span)
        expected = {taken: self.tiles.num_tokens, part: self.tiles.part_tokens}
        plain = isinstance(tile, Tensor) and not isinstance(tile, DTensor)
        if plain and tile.ndim == 3 and tile.shape[0] == states.shape[0] and tile.shape[1] in expected:
            return expected[tile.shape[1]]
        found = f"{type(tile).__name__} {list(tile.shape)}" if isinstance(tile, Tensor) else type(tile).__name__
        lengths = " or ".join(str(length) for length in expected)
        raise ValueError(
            f"{self.name} returned {found} for a tile of {taken} tokens, but what runs in tiles must return one plain "
            f"tensor [{states.shape[0]}, {lengths}, width]. Leave it out of tiles."
        )

    def _versions(self, taken: Tensor) -> dict[str, int]:
        """How often the input and the buffers were written to; tensors of inference mode do not count."""
        named = {"its input": taken, **{f"its buffer {name}": one for name, one in self.module.named_buffers()}}
        return {name: version_of(one) for name, one in named.items() if not one.is_inference()}
