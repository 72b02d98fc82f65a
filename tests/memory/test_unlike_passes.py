"""Blocks that change what they have computed, or run otherwise a second time: the right gradients, or an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lightning_longctx.attention import attend
from lightning_longctx.memory.checkpointed import CheckpointedBlocks
from lightning_longctx.memory.policy import Checkpointing
from tests.memory.test_checkpointed import CPU, gradients, same


class InPlace(nn.Module):
    """Changes what a linear layer returned."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.last, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change

    def forward(self, states):
        return states + self.last(self.change(self.linear(states)))


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), F.relu_, lambda x: x.add_(1).sigmoid_()])
@pytest.mark.parametrize("keep", [(), ("linear",), ("linear", "last")])
@pytest.mark.parametrize("offload", [False, True])
def test_kept_results_that_are_changed_in_place(change, keep, offload):
    torch.manual_seed(0)
    module, states = nn.Sequential(nn.ModuleList(InPlace(change) for _ in range(2))), torch.randn(5, 4)
    module.forward = lambda x: module[0][1](module[0][0](x))
    expected = gradients(module, states)
    CheckpointedBlocks(module, Checkpointing("full", keep=keep, offload=keep if offload else ()), CPU)
    assert same(gradients(module, states), expected)


def test_random_results_are_drawn_again():
    """Were a kept dropout skipped, what is drawn after it would be drawn from another state."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.again = nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, states):
            return self.again(self.drop(self.first(states)).sin())

    module = nn.ModuleList(Dropping() for _ in range(2))
    module.forward = lambda states: module[1](module[0](states))
    states = torch.randn(6, 8)
    expected = gradients(module, states)
    root = nn.Module()
    root.stack = module
    root.forward = module.forward
    CheckpointedBlocks(root, Checkpointing("full", keep=("drop",)), CPU)
    assert same(gradients(module, states), expected)


def test_attention_that_is_changed_in_place_is_refused_by_name():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, states):
            query, key, value = self.qkv(states).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            with torch.no_grad():
                found = attend(query, key, value)
            return states + found.mul_(2).transpose(1, 2).flatten(2) * query.mean()

    module = nn.Module()
    module.layers = nn.ModuleList(Changing() for _ in range(2))
    module.forward = lambda states: module.layers[1](module.layers[0](states))
    CheckpointedBlocks(module, Checkpointing("selective"), CPU)
    with pytest.raises(RuntimeError, match="what attention returned in layers.0 was changed in place"):
        gradients(module, torch.randn(1, 20, 16))


def test_a_block_that_decides_otherwise_when_it_runs_again():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.calls = nn.Sequential(nn.Linear(4, 4), nn.SiLU()), 0

        def forward(self, states):
            self.calls += 1
            return self.part(states) if self.calls % 2 == 0 else self.part(self.part(states))

    module = nn.ModuleList(Fickle() for _ in range(2))
    root = nn.Module()
    root.stack = module
    root.forward = lambda states: module[1](module[0](states))
    CheckpointedBlocks(root, Checkpointing("full", keep=("part",)), CPU)
    with pytest.raises(RuntimeError, match="runs otherwise|different number of tensors|different metadata"):
        gradients(root, torch.randn(3, 4))


def test_a_table_that_is_made_in_the_first_call_is_noticed():
    """Of operations in kept regions the recomputation has fewer than forward: results must not be taken for others."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = None, nn.Linear(4, 4)

        def forward(self, states):
            if self.table is None:
                self.table = torch.full((4,), 3.0) * 2
            return self.linear(states * self.table).sin()

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Lazy()

        def forward(self, states):
            return self.part(states).cos()

    module = nn.Module()
    module.layers = nn.ModuleList(Around() for _ in range(2))
    module.forward = lambda states: module.layers[1](module.layers[0](states))
    CheckpointedBlocks(module, Checkpointing("full", keep=("part",)), CPU)
    with pytest.raises(RuntimeError, match="layers.1 runs otherwise .* Make such things in __init__"):
        gradients(module, torch.randn(4, 4))
