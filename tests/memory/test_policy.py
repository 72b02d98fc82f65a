"""Options of ``checkpointing``: what fits together, and what is said where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint

from lightning_longctx.memory.blocks import named_blocks
from lightning_longctx.memory.checkpointed import CheckpointedBlocks
from lightning_longctx.memory.plans import BlockPlan, MemoryPlan, fixed_plan
from lightning_longctx.memory.policy import Checkpointing

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    def forward(self, states):
        return states + self.second(self.first(states))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(policy="half"), "policy='half' must be none, full, selective or auto"),
        (dict(keep=["mlp"]), r"keep=\['mlp'\] with policy=none, which keeps everything"),
        (dict(policy="auto", keep=["mlp"]), "which decides itself"),
        (dict(policy="full", recompute=["mlp"]), "run again already"),
        (dict(policy="full", offload=["attention"]), "full does not keep these regions"),
        (dict(policy="selective", offload=["mlp"]), r"offload=\['mlp'\]"),
        (dict(policy="full", budget_gib=1.0), "only auto heeds it"),
        (dict(policy="auto", budget_gib=0.0), "positive and finite"),
        (dict(tiles={"mlp": 0}), r"tiles\[mlp\]=0"),
        (dict(blocks=[]), "names no block"),
    ],
)
def test_options_that_do_not_fit_together(options, message):
    with pytest.raises(ValueError, match=message):
        Checkpointing(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(policy="full", keep=["third"]), "keep names 'third', but layers.0 .* has attention, first, second"),
        (
            dict(policy="full", keep=["second.0"], tiles={"second": 8}),
            r"keep names \['second.0'\], of which something",
        ),
        (dict(recompute=["third"]), "recompute names 'third'"),
        (dict(policy="full", keep=["second.1"]), "It has attention, second.0, and"),
        (
            dict(policy="full", blocks=["layer.*"]),
            "'layer.\\*', but Stack has no submodule.*it finds layers.0 to layers.2",
        ),
        (dict(policy="full", blocks=["layers.0", "layers.0.second"]), "layers.0.second and layers.0 around it"),
    ],
)
def test_names_that_are_not_there(options, message):
    with pytest.raises(ValueError, match=message):
        CheckpointedBlocks(Stack(), Checkpointing(**options), CPU)


def test_a_module_without_blocks():
    with pytest.raises(ValueError, match="no repeated blocks"):
        CheckpointedBlocks(nn.Linear(2, 2), Checkpointing("full"), CPU)
    assert CheckpointedBlocks(nn.Linear(2, 2), Checkpointing(), CPU).blocks == []


def test_blocks_that_run_again_by_someone_elses_doing():
    module = Stack()
    checkpoint(module.layers[1])
    with pytest.raises(ValueError, match="layers.1 has torch's checkpoint applied already"):
        CheckpointedBlocks(module, Checkpointing("full"), CPU)
    assert len(CheckpointedBlocks(module, Checkpointing(), CPU).blocks) == 2
    module = Stack()
    module.gradient_checkpointing = True
    with pytest.raises(ValueError, match="Leave gradient_checkpointing out"):
        CheckpointedBlocks(module, Checkpointing("selective"), CPU)


def test_compiled_blocks_take_the_policies_that_need_no_regions():
    module = Stack()
    module.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match="layers.0 is compiled"):
        CheckpointedBlocks(module, Checkpointing("auto", budget_gib=1.0), CPU)
    CheckpointedBlocks(module, Checkpointing("selective"), CPU)


def test_blocks_by_name():
    module = nn.ModuleDict({"one": Stack(), "two": Stack()})
    assert list(named_blocks(module, ("two.layers.*",))) == ["two.layers.0", "two.layers.1", "two.layers.2"]
    assert list(named_blocks(module)) == [f"{stack}.layers.{layer}" for stack in ("one", "two") for layer in range(3)]


def test_blocks_of_a_sequential():
    """Its members are blocks if they have parts; its norms, in a list of their own, are none then."""

    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))

    module = nn.ModuleDict({"blocks": nn.Sequential(Normed(), Normed()), "mlp": nn.Sequential(nn.ReLU(), nn.ReLU())})
    assert list(named_blocks(module)) == ["blocks.0", "blocks.1"]


def test_a_plan_is_plain_values():
    plan = MemoryPlan("auto", (BlockPlan(), BlockPlan(True, frozenset(["attention", "mlp"]), frozenset(["mlp"]))))
    assert MemoryPlan.from_dict(plan.to_dict()) == plan
    assert fixed_plan(Checkpointing(recompute=("mlp",)), 2).blocks == (BlockPlan(True),) * 2
    with pytest.raises(ValueError, match="2 blocks does not fit 3 blocks"):
        CheckpointedBlocks(Stack(), Checkpointing(), CPU).use(plan)
