"""What cannot run in tiles says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_longctx.memory.tiling.tiles import tile
from tests.memory.tiled_modules import LENGTH, WIDTH, Block, GatedMLP, inputs, seeded


class Writes(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states.relu_()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, states: Tensor) -> Tensor:
        self.seen += states.shape[1]
        return states


class Returns(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Any:
        return self.change(states)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (Writes(), lambda x: (x,), "Writes writes to its input"),
        (Counts(), lambda x: (x,), "Counts writes to its buffer seen"),
        (Returns(lambda x: (x, x)), lambda x: (x,), "Returns returned tuple for a tile of 4 tokens"),
        (Returns(lambda x: x.mean(1)), lambda x: (x,), r"returned Tensor \[2, 8\] for a tile of 4"),
        (Returns(lambda x: x[:, :1]), lambda x: (x,), r"\[2, 1, 8\] .* plain tensor \[2, 4, width\]"),
        (Returns(lambda x: x[..., : x.shape[1]]), lambda x: (x,), r"\[2, 1, 1\] for one tile"),
        (Returns(abs), lambda x: (x[0],), r"a tensor \[B, T, width\], .* not Tensor \[13, 8\]"),
        (Returns(abs), lambda x: ((x,),), r"must be a tensor \[B, T, width\]"),
        (Returns(abs), lambda x: (), "not None"),
        (Returns(abs), lambda x: (x, [torch.ones(2, LENGTH)]), r"got a tensor \[2, 13\] .* one row per token"),
        (Returns(abs), lambda x: (x, torch.ones(3, requires_grad=True)), r"got a tensor \[3\] .* gradients"),
    ],
)
def test_calls_that_cannot_be_cut_are_refused(module, arguments, message):
    tile(module, 4)
    with pytest.raises(ValueError, match=message):
        module(*arguments(inputs()))


def test_other_arguments_go_to_every_tile():
    module = Returns(abs)
    module.forward = lambda states, factor, *, shift: factor * states + shift
    tile(module, 4)
    assert torch.equal(module(inputs(), 2.0, shift=torch.ones(WIDTH)), 2.0 * inputs() + 1.0)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (GatedMLP(), {"tokens": 0}, "tokens=0 of GatedMLP"),
        (GatedMLP(), {"tokens": 4, "num_ranks": 1.0}, "num_ranks=1.0 of GatedMLP"),
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), {"tokens": 4}, "tokens meet in BatchNorm1d 1"),
        (torch.compile(GatedMLP(), backend="eager"), {"tokens": 4}, "Tile the module first"),
    ],
)
def test_modules_that_cannot_be_cut_are_refused(module, options, message):
    with pytest.raises(ValueError, match=message):
        tile(module, **options)


def test_backward_needs_the_parameters_of_forward():
    module = seeded()
    tile(module, 4)
    others = {name: (2 * one).detach().requires_grad_() for name, one in module.named_parameters()}
    result = torch.func.functional_call(module, others, (inputs(),)).sum()
    with pytest.raises(RuntimeError, match="GatedMLP has other parameters in backward"):
        result.backward()
    result = module(inputs()).sum()
    with torch.no_grad():
        module.up.bias.zero_()
    with pytest.raises(RuntimeError, match="written to between forward and backward"):
        result.backward()


def test_second_derivatives_are_refused():
    module, states = seeded(), inputs().requires_grad_()
    tile(module, 4)
    (first,) = torch.autograd.grad(module(states).pow(2).sum(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_whole_graph_cannot_be_compiled():
    block = seeded(Block)
    tile(block.mlp, 4)
    block.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="runs in tiles"):
        block(inputs())


def test_hooks_on_gradients_of_parameters_are_refused():
    """They would see the gradient of every tile, and then the sum."""
    module = seeded()
    tile(module, 4)
    hook = module.up.bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ValueError, match=r"GatedMLP runs in tiles, but its parameter up\.bias has a hook"):
        module(inputs())
    hook.remove()
    seen: list[Tensor | None] = []
    module.up.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    module(inputs()).sum().backward()
    assert len(seen) == 1 and seen[0] is module.up.bias.grad
