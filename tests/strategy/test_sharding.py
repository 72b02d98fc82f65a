"""Start values and distribution of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_longctx.strategy.parameters.sharding import (
    copy_from_first_rank,
    distribute,
    materialise,
    repeated_blocks,
    reshard,
)
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees
from lightning_longctx.topology.mesh import build_mesh
from tests.strategy.modules import Plain

Pools = Callable[[int], GlooPool]


def test_blocks_are_members_of_a_stack() -> None:
    module = nn.ModuleDict(
        {
            "stack": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)),
            "single": nn.ModuleList([nn.Linear(2, 2)]),
            "mixed": nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]),
            "pairs": nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)),
        }
    )
    assert repeated_blocks(module) == [*module["stack"], *module["pairs"][0], *module["pairs"][1]]


def test_a_block_that_shares_weights_stays_with_the_rest() -> None:
    stack = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    module = nn.ModuleDict({"stack": stack, "head": nn.Linear(4, 4)})
    module["head"].weight = stack[1].weight
    assert repeated_blocks(module) == [stack[0], stack[2]]


def test_a_block_that_runs_twice_counts_once() -> None:
    block = nn.Linear(4, 4)
    assert repeated_blocks(nn.ModuleDict({"stack": nn.ModuleList([block, block])})) == [block]


def test_materialise_fills_and_keeps_ties() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8))
        module[1].weight = module[0].weight
    materialise(module, torch.device("cpu"))
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
    assert module[1].weight is module[0].weight
    assert torch.equal(module[2].running_var, torch.ones(8))
    assert torch.isfinite(module[0].weight).all()


def test_materialise_names_what_it_cannot_fill() -> None:
    class Helpless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.arange(4.0))

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Helpless())
    with pytest.raises(ValueError, match=r"Helpless: .*reset_parameters"):
        materialise(module, torch.device("cpu"))


def start_values() -> dict[str, Tensor]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    module = Plain()
    module.register_buffer("flags", torch.tensor([True, False, rank == 0]))
    module.register_parameter("transposed", nn.Parameter(torch.randn(3, 4).t()))
    copy_from_first_rank(module)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def test_replicas_start_bit_equal(gloo: Pools) -> None:
    first, second = gloo(2).run(start_values)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["flags"].tolist() == [True, False, True]


def distributed(sharding: str) -> tuple[bool, bool, list[int]]:
    module = Plain()
    mesh = build_mesh(Degrees(data=2), "cpu").loss
    distribute(module, mesh, sharding)  # type: ignore[arg-type]
    all_distributed = all(isinstance(parameter, DTensor) for parameter in module.parameters())
    with torch.no_grad():
        module(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None])
    reshard(module)
    again = all(isinstance(parameter, DTensor) for parameter in module.parameters())
    return all_distributed, again, [parameter.to_local().numel() for parameter in module.parameters()]  # type: ignore


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_every_parameter_is_distributed(gloo: Pools, sharding: str) -> None:
    sizes = [parameter.numel() for parameter in Plain().parameters()]
    for before, after, local in gloo(2).run(distributed, sharding):
        assert before
        assert after
        assert local == [size // 2 if sharding == "fsdp" else size for size in sizes]
