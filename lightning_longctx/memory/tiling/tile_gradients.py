"""A call in token tiles, and its backward, which runs each tile once more and adds up what it gives.

The input is saved by an identity in front of the tiles, not by the tiles themselves. Non-reentrant checkpointing runs a
block again only until everything that was saved in it is there: where tiles come last, it stops right before them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_longctx._upstream import has_gradient_hooks, version_of
from lightning_longctx.memory.tiling.random_state import RandomState
from lightning_longctx.memory.tiling.recorded_tile import RecordedTile
from lightning_longctx.memory.tiling.tile_call import TileCall


def run_in_tiles(call: TileCall, states: Tensor) -> Tensor:
    """Run a module tile by tile; in backward every tile runs again, and only what one tile needs is there at a time.

    Gradients of parameters are added up over the tiles in float32 (float64 for float64), and cast once to the
    parameter's dtype. After ALST's TiledMLP (arXiv 2506.13996).

    Args:
        call: The module and its tiles.
        states: [B, T, W].

    Returns:
        As ``TileCall.forward``.
    """
    parameters = call.trainable()
    if not torch.is_grad_enabled() or not (states.requires_grad or parameters):
        with torch.no_grad():
            return call.forward(states)
    _check_hooks(call)
    # An identity without gradient would not be in the graph, and could save nothing.
    always = torch.empty(0, device=states.device, requires_grad=True)
    needs_input = states.requires_grad
    kept = _Keep.apply(states, always)
    return _Tiles.apply(call, kept.grad_fn, needs_input, kept, *parameters)  # type: ignore[return-value]


class _Keep(torch.autograd.Function):
    """Identity that saves its input, whatever keeps saved tensors (checkpointing, offloading) has its way with it."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, always: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(states)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return gradient, None


class _Tiles(torch.autograd.Function):
    """Holds the graphs of the tiles, and no tensors but parameters."""

    @staticmethod
    def forward(
        ctx: Any, call: TileCall, kept: Any, needs_input: bool, states: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.kept = call, kept
        ctx.parameters = [(parameter, version_of(parameter)) for parameter in parameters]
        ctx.tiles = {span: RecordedTile(call, span, needs_input) for span in call.tiles.spans}
        return call.forward(states, lambda taken, span: ctx.tiles[span].forward(taken))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if gradient is None:
            return (None,) * (4 + len(ctx.parameters))
        parameters = _unchanged(ctx.call, ctx.parameters)
        (states,) = ctx.kept.saved_tensors  # once: checkpointing hands a tensor out once
        found, *sums = _backward(ctx.call, list(ctx.tiles.values()), states.detach(), gradient, parameters)
        return (None, None, None, found, *sums)


def _check_hooks(call: TileCall) -> None:
    for name, parameter in call.module.named_parameters():
        if parameter.requires_grad and has_gradient_hooks(parameter):
            raise ValueError(
                f"{call.name} runs in tiles, but its parameter {name} has a hook (register_hook), which would see the "
                "gradient of every tile, and then their sum. Use register_post_accumulate_grad_hook, or leave it out."
            )


def _unchanged(call: TileCall, known: list[tuple[nn.Parameter, int]]) -> tuple[nn.Parameter, ...]:
    """The parameters of forward, as long as backward can run the tiles with the very same."""
    now = call.trainable()
    if len(now) != len(known) or any(one is not parameter for one, (parameter, _) in zip(now, known, strict=True)):
        raise RuntimeError(
            f"{call.name} has other parameters in backward than it had in forward (torch.func.functional_call, or "
            "requires_grad set in between), but its tiles run again with them. Leave it out of tiles."
        )
    if any(version_of(parameter) != version for parameter, version in known):
        raise RuntimeError(
            f"parameters of {call.name} were written to between forward and backward, which runs its tiles again. "
            "Step the optimizer after backward."
        )
    return now


def _backward(
    call: TileCall,
    tiles: list[RecordedTile],
    states: Tensor,
    gradient: Tensor,
    parameters: tuple[nn.Parameter, ...],
) -> list[Tensor | None]:
    """Gradients of the input and of every parameter; None for what nothing depends on."""
    found = _InputGradient(call, states)
    sums: list[Tensor | None] = [None] * len(parameters)
    outside = RandomState.now(states.device) if any(tile.draws for tile in tiles) else None
    for tile in tiles:
        taken = call.take(states, tile.span)
        own, gradients = tile.backward(taken, call.tiles.take(gradient, tile.span), parameters)
        found.put(tile.span, own)
        sums = [_added(total, part) for total, part in zip(sums, gradients, strict=True)]
    if outside is not None:
        outside.restore()
    return [found.whole(), *(_cast(total, one) for total, one in zip(sums, parameters, strict=True))]


class _InputGradient:
    """Put together from those of the tiles; where the input is a DTensor, sums over ranks stay open in it as in them.

    Args:
        call: The call.
        states: Its input.
    """

    def __init__(self, call: TileCall, states: Tensor) -> None:
        self._call, self._states = call, states
        self._found: Tensor | None = None
        self._placements: Any = None

    def put(self, span: range, own: Tensor | None) -> None:
        """The gradient of a tile; None: nothing depends on it."""
        if own is None:
            return
        if isinstance(own, DTensor):
            self._placements = self._placements or own.placements
            own = cast("DTensor", own.redistribute(placements=self._placements)).to_local()
        if self._found is None:
            self._found = torch.zeros(self._states.shape, dtype=own.dtype, device=own.device)
        self._call.tiles.put(self._found, span, own)

    def whole(self) -> Tensor | None:
        """The gradient of the input; None if no tile had one."""
        if self._found is None or self._placements is None:
            return self._found
        mesh = cast("DTensor", self._states).device_mesh
        return DTensor.from_local(self._found, mesh, self._placements, run_check=False)


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Sum in float32 or wider; ``part`` may be another gradient as well, and is left as it is."""
    if part is None:
        return total
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
    return total.add_(part)


def _cast(total: Tensor | None, parameter: nn.Parameter) -> Tensor | None:
    return None if total is None else total.to(parameter.dtype)
