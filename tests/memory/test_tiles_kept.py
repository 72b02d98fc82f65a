"""What tiles keep for backward, and what runs how often: alone, in checkpointed and in compiled blocks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable import checkpoint
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lightning_longctx.memory.tiling.tiles import tile
from tests.memory.tiled_modules import LENGTH, WIDTH, Block, GatedMLP, assert_close, inputs, numbers, seeded


@pytest.mark.parametrize("wrapped", [False, True])
def test_dropout_draws_the_same_in_backward(wrapped):
    """Against the tiles in a row under autograd, which draw as they go."""
    block = seeded(lambda: Block(dropout=0.5))
    states = inputs()

    def run(forward: Callable[[Tensor], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        block.zero_grad()
        torch.manual_seed(7)
        wanted = states.clone().requires_grad_()
        result = forward(wanted)
        torch.rand(5)  # forward goes on before backward begins
        result.pow(2).sum().backward()
        found = {name: one.grad.clone() for name, one in (("input", wanted), *block.named_parameters())}  # type: ignore
        return found, torch.rand(1)

    def in_a_row(wanted: Tensor) -> Tensor:
        parts = block.norm(wanted).split(4, dim=1)
        return wanted + torch.cat([block.mlp(part) for part in parts], dim=1)

    expected, next_draw = run(in_a_row)
    tile(block.mlp, 4)
    if wrapped:
        checkpoint(block)
    actual, other_draw = run(block)
    assert_close(actual, expected, 1e-12)
    assert torch.equal(next_draw, other_draw)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("needs_input", [False, True])
def test_nothing_runs_more_often_than_forward_once_and_backward_once(wrapped, needs_input):
    """A checkpointed block that ends with tiles stops in front of them when it runs again."""
    block, states = seeded(Block), inputs()
    expected = numbers(block, states, needs_input)
    tile(block.mlp, 4)
    if wrapped:
        checkpoint(block)
    norms: list[int] = []
    block.norm.register_forward_hook(lambda *_: norms.append(1))
    block.mlp.calls.clear()
    assert_close(numbers(block, states, needs_input), expected, 1e-12)
    assert len(norms) == 1 + wrapped
    assert block.mlp.calls == 2 * [4, 4, 4, 1]


def products(run: Callable[[], object]) -> float:
    """How many of the three matrices were multiplied with."""
    with FlopCounterMode(display=False) as flops:
        run()
    return flops.get_total_flops() / (2 * 2 * LENGTH * WIDTH * 24)


def test_the_last_product_is_not_repeated():
    module, results = seeded(), []
    tile(module, 4)
    assert products(lambda: results.append(module(inputs().requires_grad_()).sum())) == 3
    assert products(lambda: results[0].backward()) == 2 + 2 * 3


def test_only_the_input_is_saved_and_nothing_stays_behind():
    module, saved = seeded(), []
    tile(module, 4)
    states = inputs().requires_grad_()
    collected = gc.isenabled()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.shape) or one, lambda one: one):
            result = module(states)
        assert saved == [states.shape]
        forgotten = weakref.ref(result.grad_fn)
        node = weakref.ref(next(iter(result.grad_fn.tiles.values())))
        result.sum().backward()
        del result
        assert forgotten() is None and node() is None
    finally:
        if collected:
            gc.enable()


class PostNorm(Block):
    def forward(self, states: Tensor) -> Tensor:
        return states + self.norm(self.mlp(states))


def test_tiles_whose_result_is_saved_run_again():
    block = seeded(PostNorm)
    expected = numbers(block, inputs())
    tile(block.mlp, 4)
    checkpoint(block)
    block.mlp.calls.clear()
    assert_close(numbers(block, inputs()), expected, 1e-12)
    assert len(block.mlp.calls) == 12


def test_gradients_accumulate_and_a_graph_serves_twice():
    module, states = seeded(), inputs().requires_grad_()
    tile(module, 4)
    result = module(states).sum()
    result.backward(retain_graph=True)
    once = {name: one.grad.clone() for name, one in module.named_parameters()}
    result.backward()
    for name, one in module.named_parameters():
        torch.testing.assert_close(one.grad, 2 * once[name], rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        result.backward()


@pytest.mark.parametrize("compiled", ["block", "mlp", "up"])
def test_compiled_modules_run_their_tiles_uncompiled(compiled):
    block = seeded(Block)
    expected = numbers(block, inputs())
    tile(block.mlp, 4)
    part = {"block": block, "mlp": block.mlp, "up": block.mlp.up}[compiled]
    part.compile(backend="aot_eager")
    block.mlp.calls.clear()
    assert_close(numbers(block, inputs()), expected, 1e-12)
    assert len(block.mlp.calls) == 8


@pytest.mark.parametrize("how", ["selective", "compiled"])
def test_blocks_may_be_checkpointed_selectively_and_compiled(how):
    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        kept = op == torch.ops.aten.native_layer_norm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    block = seeded(Block)
    expected = numbers(block, inputs())
    tile(block.mlp, 4)
    if how == "selective":
        checkpoint(block, context_fn=partial(create_selective_checkpoint_contexts, policy))
    else:
        checkpoint(block).compile(backend="aot_eager")
    block.mlp.calls.clear()
    assert_close(numbers(block, inputs()), expected, 1e-12)
    assert len(block.mlp.calls) == 8


def test_fake_tensors_pass_through():
    with FakeTensorMode():
        module, states = GatedMLP(), torch.randn(2, LENGTH, WIDTH, requires_grad=True)
        tile(module, 4)
        module(states).sum().backward()
    assert states.grad.shape == states.shape and module.up.weight.grad.shape == module.up.weight.shape  # type: ignore


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch's CPU allocator had out at a time, beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore
    total = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def test_memory_is_that_of_a_tile():
    """Input, output and gradients stay whole; what is in between is there for 64 of 1,024 tokens."""
    length, width, wide = 1024, 16, 256
    module = seeded(lambda: GatedMLP(width, wide), torch.float32)
    states = torch.randn(1, length, width, requires_grad=True)
    whole, parameters = states.numel() * 4, 4 * sum(one.numel() for one in module.parameters())

    def step() -> None:
        states.grad = None
        module.zero_grad()
        module(states).sum().backward()

    between_whole = peak_bytes(step) - 3 * whole - parameters
    tile(module, 64)
    between_tiled = peak_bytes(step) - 3 * whole - 2 * parameters  # their sums, and those of one tile
    assert between_whole > 4 * length * wide * 4
    assert between_tiled < between_whole / 12, (between_tiled, between_whole)
