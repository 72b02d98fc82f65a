"""Runs submodules that treat every token alone in tiles of tokens, forward and backward.

What a module holds in between is there for one tile at a time; in turn backward runs every tile once more. The module
stays what it is: the same class, parameters, names and hooks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_longctx._upstream import tree_leaves
from lightning_longctx.memory.tiling.tile_gradients import TileCall, run_in_tiles
from lightning_longctx.memory.tiling.token_tiles import TokenTiles

_MIXING = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.MultiheadAttention,
    nn.RNNBase,
)
"""Modules in which tokens meet."""


def tile(module: nn.Module, tokens: int, num_ranks: int = 1) -> None:
    """Let a module run in tiles of tokens from now on; a second call changes the size of the tiles.

    Its first positional argument must be a tensor [B, T, W], and what it returns one tensor [B, T, W'], of which row t
    depends on row t of the argument only. That is the caller's word: an expert layer with a capacity, say, would give
    other numbers. Other arguments go to every tile as they are. Hooks of the module run around all of its tiles, those
    of its submodules for every tile.

    Backward needs the input only, and runs every tile again up to the last tensor that its gradients take: in a block
    that is checkpointed as well, and in which nothing after the module saves its result, this is the only repetition.
    Gradients of parameters are added up over the tiles in float32 (float64 for float64). Every tile of a call takes
    some 20 KB of host memory until its backward, for its graph. Second derivatives are refused.

    Results equal those without tiles but for rounding. Under dropout they are other draws: every tile draws for itself,
    and the same again in backward. In a module that is compiled, or inside of one, tiles run uncompiled (submodules
    that are compiled by themselves stay so); ``fullgraph=True`` fails there.

    Where tensor ranks gather tokens in front of the module and scatter them behind it (``models.tensor_plan``), a tile
    is made of as many tokens of each rank. ``T`` is the gathered number, and the result may be [B, T / n, W'].

    Args:
        module: Any that treats every token alone, such as an MLP.
        tokens: How many of the T to run at a time, in all rows of the batch.
        num_ranks: Tensor ranks, n. Every tile has at least one token of each.

    Raises:
        ValueError: A number is below 1, or the module cannot run in tiles; calls of it raise one for arguments and
            results that do not fit.

    Source: ALST's TiledMLP, arXiv 2506.13996.
    """
    kind = type(module).__name__
    for name, number in (("tokens", tokens), ("num_ranks", num_ranks)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}={number!r} of {kind} in tiles must be a whole number, at least 1.")
    if hasattr(module, "_orig_mod"):
        raise ValueError(f"{kind} is what torch.compile returned. Tile the module first, or compile what is inside it.")
    if mixing := next((name for name, part in module.named_modules() if isinstance(part, _MIXING)), None):
        part = type(module.get_submodule(mixing)).__name__
        raise ValueError(f"{kind} cannot run in tiles: tokens meet in {part} {mixing}. Leave it out of tiles.".rstrip())
    before = module.__dict__.get("forward")
    if isinstance(before, _TiledForward):
        before = before.before
    module.forward = _TiledForward(module, tokens, num_ranks, before)


def untile(module: nn.Module) -> None:
    """Let a module run on all tokens at once again, as before ``tile``.

    Raises:
        ValueError: It is not tiled.
    """
    tiled = module.__dict__.get("forward")
    if not isinstance(tiled, _TiledForward):
        raise ValueError(f"{type(module).__name__} does not run in tiles: there is nothing to undo.")
    if tiled.before is None:
        del module.forward
    else:
        module.forward = tiled.before


def is_tiled(module: nn.Module) -> bool:
    """Whether a module runs in tiles."""
    return isinstance(module.__dict__.get("forward"), _TiledForward)


class _TiledForward:
    """Stands for ``module.forward``; an object, not a closure, so that modules can be copied and pickled.

    Args:
        module: The tiled one.
        tokens: As in ``tile``.
        num_ranks: As in ``tile``.
        before: What stood for ``module.forward`` already; None: nothing did but the class's own.
    """

    def __init__(self, module: nn.Module, tokens: int, num_ranks: int, before: Any) -> None:
        self.module, self.tokens, self.num_ranks, self.before = module, tokens, num_ranks, before

    @torch.compiler.disable(reason="runs in tiles (lightning_longctx.memory.tiling.tiles)")
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        name = type(self.module).__name__
        states = self._checked(name, *args)
        self._check_others(name, states, args[1:], kwargs)
        self._check_distribution(name)
        tiles = TokenTiles(states.shape[1], self.tokens, self.num_ranks)
        call = TileCall(self.module, partial(self._run, args[1:], kwargs), tiles, name)
        return run_in_tiles(call, states)

    def _run(self, others: tuple[Any, ...], kwargs: dict[str, Any], states: Tensor) -> Any:
        if self.before is not None:
            return self.before(states, *others, **kwargs)
        return type(self.module).forward(self.module, states, *others, **kwargs)

    def _checked(self, name: str, states: Any = None, *_: Any) -> Tensor:
        cut = isinstance(states, DTensor) and not all(placement.is_replicate() for placement in states.placements)
        if not isinstance(states, Tensor) or cut or states.ndim != 3:
            found = f"{type(states).__name__} {list(states.shape)}" if isinstance(states, Tensor) else repr(states)
            raise ValueError(
                f"the first positional argument of {name}, which runs in tiles, must be a tensor [B, T, width], on all "
                f"tensor ranks the same, not {'a cut ' if cut else ''}{found}. Leave {name} out of tiles."
            )
        if states.shape[1] % self.num_ranks:
            raise ValueError(
                f"{name} runs in tiles on {states.shape[1]} tokens, which {self.num_ranks} tensor ranks do not share "
                "evenly. Pad the sequence, or leave it out of tiles."
            )
        return states

    def _check_others(self, name: str, states: Tensor, others: Any, kwargs: Any) -> None:
        for other in tree_leaves((others, kwargs)):
            if not isinstance(other, Tensor):
                continue
            per_token = states.shape[1] > 1 and states.shape[1] in other.shape
            if per_token or (other.requires_grad and torch.is_grad_enabled()):
                why = "one row per token" if per_token else "gradients"
                raise ValueError(
                    f"{name} runs in tiles, but got a tensor {list(other.shape)} besides its input that seems to have "
                    f"{why}: only the first positional argument is cut. Leave {name} out of tiles."
                )

    def _check_distribution(self, name: str) -> None:
        from torch.distributed.fsdp import FSDPModule

        for inner, part in self.module.named_modules():
            if inner and isinstance(part, FSDPModule):
                raise ValueError(
                    f"{name} runs in tiles, but its part {inner} is sharded by itself, and would be gathered for every "
                    f"tile. Shard {name} as a whole, or leave it out of tiles."
                )
