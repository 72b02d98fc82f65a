"""Blocks that run again: the gradients of those that do not, bit for bit, and no more work than was asked for."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_longctx.attention import attend
from lightning_longctx.attention.op import rings_run
from lightning_longctx.memory.checkpointed import CheckpointedBlocks
from lightning_longctx.memory.policy import Checkpointing
from lightning_longctx.models import Decoder, DecoderConfig

CPU = torch.device("cpu")
CONFIG = DecoderConfig(vocab_size=64, width=32, num_layers=3, num_heads=4, attention_dropout=0.2, dropout=0.1)
POLICIES = [
    Checkpointing(),
    Checkpointing("full"),
    Checkpointing("selective"),
    Checkpointing("full", keep=("mlp",)),
    Checkpointing("selective", keep=("attention_norm", "attention.query", "mlp.gate"), offload=("mlp.gate",)),
    Checkpointing("selective", offload=("attention",)),
    Checkpointing(recompute=("mlp", "attention_norm")),
]


def gradients(module, inputs, seed=3):
    for weight in module.parameters():
        weight.grad = None
    torch.manual_seed(seed)
    loss = module(inputs).square().mean()
    torch.randn(7)  # numbers that are drawn between forward and backward
    loss.backward()
    return {name: weight.grad.clone() for name, weight in module.named_parameters()}


class Operations(TorchDispatchMode):
    """Counts what really runs: what is kept does not come to a mode that was entered before the block's."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("options", POLICIES, ids=lambda options: str(options.policy) + "+".join(options.keep))
def test_gradients_bit_for_bit_with_dropout(options):
    torch.manual_seed(0)
    module, tokens = Decoder(CONFIG), torch.randint(64, (2, 40))
    expected = gradients(module, tokens)
    blocks = CheckpointedBlocks(module, options, CPU)
    for _ in range(2):  # what waits in host memory comes back to the right pass
        assert same(gradients(module, tokens), expected)
    assert {name for name, _ in module.named_parameters()} == set(expected)
    blocks.close()
    assert same(gradients(module, tokens), expected)


@pytest.mark.parametrize(("policy", "calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_how_often_attention_runs(policy, calls):
    module, tokens = Decoder(CONFIG), torch.randint(64, (1, 30))
    CheckpointedBlocks(module, Checkpointing(policy), CPU)
    before = rings_run()
    gradients(module, tokens)
    assert rings_run() - before == calls * CONFIG.num_layers


def test_evaluation_keeps_nothing_and_a_step_without_backward_leaves_nothing():
    module, tokens = Decoder(CONFIG).eval(), torch.randint(64, (1, 30))
    blocks = CheckpointedBlocks(module, Checkpointing("selective", offload=("attention",)), CPU)
    with torch.no_grad():
        module(tokens)
    module(tokens)
    gradients(module.train(), tokens)
    assert all(one() is None for block in blocks.blocks for one in block._passes)


def test_compiled_blocks():
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=64, width=32, num_layers=2, num_heads=4)
    module, tokens = Decoder(config), torch.randint(64, (1, 30))
    expected = gradients(module, tokens)
    for block in module.blocks:
        block.compile(backend="aot_eager")
    CheckpointedBlocks(module, Checkpointing("selective"), CPU)
    before = rings_run()
    found = gradients(module, tokens)
    assert rings_run() - before == config.num_layers
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


class Plain(nn.Module):
    """A block around some attention."""

    def __init__(self, attention):
        super().__init__()
        self.qkv, self.attention = nn.Linear(16, 48), attention

    def forward(self, states):
        query, key, value = self.qkv(states).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return states + self.attention(query, key, value).transpose(1, 2).flatten(2)


def plain_stack(attention):
    torch.manual_seed(0)
    module = nn.Module()
    module.layers = nn.ModuleList(Plain(attention) for _ in range(2))
    module.forward = lambda states: module.layers[1](module.layers[0](states))
    return module, torch.randn(1, 20, 16)


def test_attention_in_a_plain_block():
    module, states = plain_stack(attend)
    expected = gradients(module, states)
    CheckpointedBlocks(module, Checkpointing("selective"), CPU)
    before = rings_run()
    assert same(gradients(module, states), expected)
    assert rings_run() - before == 2


@pytest.mark.parametrize(("policy", "calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_how_often_plain_attention_runs(policy, calls):
    """PyTorch's own attention, as on one process."""
    module, states = plain_stack(partial(F.scaled_dot_product_attention, is_causal=True))
    expected = gradients(module, states)
    CheckpointedBlocks(module, Checkpointing(policy), CPU)
    with Operations() as ran:
        assert same(gradients(module, states), expected)
    assert ran.names["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 2 * calls


def test_a_block_that_runs_twice_in_a_step_under_autocast():
    """Autocast remembers the casts of weights: the second pass has fewer operations than its recomputation."""
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=64, width=32, num_layers=2, num_heads=4)
    module, tokens = Decoder(config), torch.randint(64, (1, 30))

    def step():
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(tokens).float().square().mean() + 2 * module(tokens.flip(1)).float().square().mean()
        loss.backward()
        return {name: weight.grad.clone() for name, weight in module.named_parameters()}

    expected = step()
    for options in (Checkpointing("selective", keep=("mlp", "attention.query")), Checkpointing("full", keep=("mlp",))):
        blocks = CheckpointedBlocks(module, options, CPU)
        assert same(step(), expected)
        blocks.close()


def test_a_setup_that_failed_can_be_repeated():
    module, tokens = Decoder(CONFIG), torch.randint(64, (1, 30))
    expected = gradients(module, tokens)
    CheckpointedBlocks(module, Checkpointing("full"), CPU)
    again = CheckpointedBlocks(module, Checkpointing("selective"), CPU)
    before = rings_run()
    assert same(gradients(module, tokens), expected)
    assert rings_run() - before == CONFIG.num_layers
    again.close()
