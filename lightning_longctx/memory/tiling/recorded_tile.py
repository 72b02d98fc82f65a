"""The graph of one tile without the tensors that its backward needs: the tile runs again for these, up to the last.

A tile is checkpointed as a block is, so that its last product, and what tensor ranks send after it, is not repeated.
Only its input is not kept: the graph begins with a node that finds it in a slot, which backward fills again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_longctx._upstream import is_fake
from lightning_longctx.memory.tiling.random_state import RandomState
from lightning_longctx.memory.tiling.tile_call import TileCall


class RecordedTile:
    """Runs once in forward; in backward, for gradients.

    Args:
        call: The call.
        span: The tile's tokens.
        needs_input: Whether its input has a gradient.
    """

    def __init__(self, call: TileCall, span: range, needs_input: bool) -> None:
        self.span = span
        self._slot = _Slot(call, needs_input)
        self._edge: GradientEdge | None = None  # not in the slot, which the graph holds: it would never be freed
        self._random: RandomState | None = None

    @property
    def draws(self) -> bool:
        """Whether forward drew random numbers."""
        return self._random is not None

    def forward(self, taken: Tensor) -> Any:
        """The tile's result, without its graph, of its input."""
        slot, before = self._slot, RandomState.now(taken.device)
        slot.states = taken
        with torch.enable_grad():
            result = checkpoint(slot.run, use_reentrant=False, preserve_rng_state=False, early_stop=True)
        slot.states = None
        drew = not is_fake(taken) and not before.equals(RandomState.now(taken.device))
        self._random = before if drew else None
        if not isinstance(result, Tensor):
            return result
        self._edge = get_gradient_edge(result) if result.requires_grad else None
        return result.detach()

    def backward(
        self, taken: Tensor, gradient: Tensor, parameters: tuple[nn.Parameter, ...]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of the input and of every parameter; None for what nothing depends on.

        Args:
            taken: The same input as in forward.
            gradient: Of the result.
            parameters: Those of forward.
        """
        if self._edge is None:
            return None, [None] * len(parameters)
        slot, sources = self._slot, self._slot.sources()
        slot.states = taken
        if self._random is not None:
            self._random.restore()
        wanted = [*sources, *parameters]
        # The graph may be asked for again, and has nothing to free.
        found = torch.autograd.grad([self._edge], wanted, [gradient], retain_graph=True, allow_unused=True)
        own, slot.states, slot.gradient = slot.gradient, None, None
        return own, list(found[len(sources) :])


class _Slot:
    """Where a tile's graph finds its input, and leaves the input's gradient."""

    def __init__(self, call: TileCall, needs_input: bool) -> None:
        self._call, self.name = call, call.name
        self.always = torch.empty(0, requires_grad=True) if needs_input else None
        self.states: Tensor | None = None
        self.gradient: Tensor | None = None

    def sources(self) -> list[Tensor]:
        """What leads autograd to the input's gradient."""
        return [] if self.always is None else [self.always]

    def run(self) -> Any:
        """The tile's result."""
        states = self.states if self.always is None else _Input.apply(self.always, self)
        return self._call.run(states)  # type: ignore[arg-type]


class _Input(torch.autograd.Function):
    """The input in a slot, as something that has a gradient."""

    @staticmethod
    def forward(ctx: Any, always: Tensor, slot: _Slot) -> Tensor:
        ctx.slot = slot
        if slot.states is None:
            raise RuntimeError(
                f"{slot.name} runs in tiles, and something that it left behind besides its result (an attribute of the "
                "module, such as an auxiliary loss) is differentiated: tiles keep nothing of it. Leave it out of "
                "checkpointing.tiles."
            )
        return slot.states.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.slot.gradient = gradient
        return None, None
