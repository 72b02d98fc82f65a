"""Blocks that run again in backward: the same draws (B29), and results that are changed in place (B53)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lightning_longctx.memory.checkpointed import CheckpointedBlocks
from lightning_longctx.memory.policy import Checkpointing

CPU = torch.device("cpu")


class Stack(nn.Module):
    def __init__(self, make_block):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make_block() for _ in range(2))

    def forward(self, states):
        for block in self.blocks:
            states = block(states)
        return states


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, states):
        return states + self.dropout(self.down(self.dropout(F.gelu(self.up(states)))))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states):
        return F.relu_(self.second(self.first(states).mul_(2)))


def gradients(module, extra_draws):
    module.zero_grad()
    torch.manual_seed(5)
    loss = module(torch.linspace(-1, 1, 48).view(6, 8)).square().sum()
    torch.rand(extra_draws)
    loss.backward()
    return [weight.grad.clone() for weight in module.parameters()]


def check(make_block, options):
    module = Stack(make_block)
    expected = gradients(module, extra_draws=0)
    CheckpointedBlocks(module, options, CPU)
    found = gradients(module, extra_draws=11)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "options",
    [Checkpointing("full"), Checkpointing("selective"), Checkpointing("full", keep=("up", "dropout"))],
    ids=["full", "selective", "list"],
)
def test_recomputed_dropout_draws_the_same(options):
    check(Dropping, options)


@pytest.mark.parametrize("keep", [(), ("first",), ("first", "second")])
def test_kept_results_changed_in_place_never_change_a_gradient(keep):
    check(InPlace, Checkpointing("selective", keep=keep))
