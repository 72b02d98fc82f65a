"""Token tiles in one process: the numbers of the plain module, which stays what it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lightning_longctx.memory.tiling.tiles import tile, untile
from lightning_longctx.memory.tiling.token_tiles import TokenTiles
from tests.memory.tiled_modules import LENGTH, WIDTH, Block, assert_close, inputs, numbers, seeded


@pytest.mark.parametrize("tokens", [1, 4, 12, 13, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_numbers_are_those_of_the_plain_module(tokens, dtype, tolerance):
    module = seeded(dtype=dtype)
    expected = numbers(module, inputs(dtype))
    tile(module, tokens)
    assert_close(numbers(module, inputs(dtype)), expected, tolerance)


def test_every_span_of_tokens_is_run_once():
    tiles = TokenTiles(12, 5, num_ranks=3)
    assert tiles.spans == (range(0, 1), range(1, 2), range(2, 3), range(3, 4))
    assert TokenTiles(12, 2, num_ranks=3).spans == tiles.spans  # no fewer than one token of each part
    assert TokenTiles(13, 5).spans == (range(0, 5), range(5, 10), range(10, 13))
    assert TokenTiles(0, 5).spans == (range(0, 0),)
    whole, other = torch.arange(24.0).view(2, 12, 1), torch.full((2, 12, 1), torch.nan)
    for span in tiles.spans:
        taken = tiles.take(whole, span)
        assert taken[0, :, 0].tolist() == [4.0 * part + token for part in range(3) for token in span]
        tiles.put(other, span, taken)
    assert torch.equal(whole, other)


def test_no_tokens_at_all():
    module = seeded()
    tile(module, 4)
    found = numbers(module, inputs(length=0))
    assert found["result"].shape == found["input"].shape == (2, 0, WIDTH)
    assert not any(one.any() for one in found.values())


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("frozen", [(), ("up.weight", "down.bias"), ("gate", "up", "down")])
def test_what_is_frozen_gets_no_gradient(frozen, needs_input):
    module = seeded()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    if not (needs_input or any(parameter.requires_grad for parameter in module.parameters())):
        tile(module, 4)
        assert not module(inputs()).requires_grad
        return
    expected = numbers(module, inputs(), needs_input)
    tile(module, 4)
    assert_close(numbers(module, inputs(), needs_input), expected, 1e-12)


class Routed(nn.Module):
    """Tokens with a positive first number go through a matrix of their own; one matrix is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.some, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied = self.shared

    def forward(self, states: Tensor) -> Tensor:
        chosen = states[..., 0] > 0
        result = self.shared(states) + self.tied.bias
        return result.masked_scatter(chosen[..., None], self.some(states[chosen])) if chosen.any() else result


def test_parameters_that_some_or_all_tiles_leave_unused():
    module, states = seeded(Routed), inputs()
    states[:, 5:, 0] = -1.0
    expected = numbers(module, states)
    assert "some.weight" in expected and "never.weight" not in expected
    tile(module, 4)
    assert_close(numbers(module, states), expected, 1e-12)


class Same(nn.Module):
    """Two parameters whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, states: Tensor) -> Tensor:
        return states * (self.first + self.second)


def test_gradients_share_no_memory():
    module = seeded(Same)
    expected = numbers(module, inputs())
    tile(module, 4)
    assert_close(numbers(module, inputs()), expected, 1e-12)
    tile(module, 64)
    numbers(module, inputs())
    assert module.first.grad.data_ptr() != module.second.grad.data_ptr()


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_errors_of_bfloat16_weights_do_not_grow_with_the_number_of_tiles(tokens):
    """Each tile's gradient is rounded once, as the whole one is; their sum is not, until it is a gradient."""
    exact = seeded(dtype=torch.bfloat16).float()
    expected = numbers(exact, inputs(torch.bfloat16, 512).float())
    module = seeded(dtype=torch.bfloat16)

    def errors(found: dict[str, Tensor]) -> dict[str, float]:
        assert all(one.dtype == torch.bfloat16 for one in found.values())
        return {name: float((found[name].float() - one).norm() / one.norm()) for name, one in expected.items()}

    plain = errors(numbers(module, inputs(torch.bfloat16, 512)))
    tile(module, tokens)
    tiled = errors(numbers(module, inputs(torch.bfloat16, 512)))
    for name, error in plain.items():
        assert tiled[name] <= 1.5 * error, (name, tiled[name], error)


def test_autocast_of_forward_holds_in_backward():
    module, states = seeded(dtype=torch.float32), inputs(torch.float32)

    def mixed() -> dict[str, Tensor]:
        module.zero_grad()
        wanted = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            result = module(1.0 * wanted)  # of a leaf autocast would keep the cast, and add gradients in bfloat16
        assert result.dtype == torch.bfloat16
        result.float().pow(2).sum().backward()
        return {name: one.grad.clone() for name, one in (("input", wanted), *module.named_parameters())}  # type: ignore

    expected, _ = mixed(), module.calls.clear()
    tile(module, 64)  # one tile: the very same operations
    for name, one in mixed().items():
        assert torch.equal(one, expected[name]), name
    tile(module, 4)
    assert_close(mixed(), expected, 2e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_tiles_run_forward_only(mode):
    module = seeded().eval()
    tile(module, 4)
    with mode():
        result = module(inputs())
        untile(module)
        torch.testing.assert_close(result, module(inputs()), rtol=0, atol=1e-12)
    assert not result.requires_grad and module.calls == [4, 4, 4, 1, LENGTH]


def test_names_stay_and_copies_are_tiled_themselves():
    block = seeded(Block)
    before = list(block.state_dict())
    tile(block.mlp, 4)
    assert list(block.state_dict()) == before and [name for name, _ in block.named_modules()][1:3] == ["norm", "mlp"]
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        expected = numbers(block, inputs())
        block.mlp.calls.clear()
        assert_close(numbers(other, inputs()), expected, 0.0)
        assert not block.mlp.calls and len(other.mlp.calls) >= 8


def test_a_second_size_replaces_the_first_and_can_be_undone():
    module = seeded()
    tile(module, 4)
    tile(module, 7)
    with torch.no_grad():
        module(inputs())
        untile(module)
        module(inputs())
    assert module.calls == [7, 6, 13]
    with pytest.raises(ValueError, match="GatedMLP does not run in tiles"):
        untile(module)


def test_a_forward_of_the_object_itself_is_kept():
    module = seeded()
    module.forward = own = lambda states: 2 * states
    tile(module, 4)
    assert torch.equal(module(inputs()), 2 * inputs())
    untile(module)
    assert module.forward is own


def test_hooks_of_the_module_run_around_all_tiles():
    module, seen = seeded(), []
    module.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    module.register_forward_hook(lambda _, args, result: seen.append((args[0].shape, result.shape)))
    expected = numbers(module, inputs())
    tile(module, 4)
    assert_close(numbers(module, inputs()), expected, 1e-12)
    assert seen == [((2, LENGTH, WIDTH),) * 2] * 2


def test_mlps_of_transformers():
    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=24, num_attention_heads=2)
    module = seeded(lambda: LlamaMLP(config))
    expected = numbers(module, inputs())
    tile(module, 5)
    assert_close(numbers(module, inputs()), expected, 1e-12)
