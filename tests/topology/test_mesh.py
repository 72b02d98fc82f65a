"""Process groups agree with the pure functions that describe them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_longctx.strategy.parameters.sharding import distribute
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import LOSS, Degrees, axis_rank, group_of
from lightning_longctx.topology.mesh import build_mesh

Pools = Callable[[int], GlooPool]


def groups(degrees: Degrees) -> dict[str, object]:
    mesh = build_mesh(degrees, "cpu")
    return {
        "names": mesh.device_mesh.mesh_dim_names,
        "loss": tuple(dist.get_process_group_ranks(mesh.loss_group)),
        "data": tuple(dist.get_process_group_ranks(mesh.data_group)),
        "head": tuple(dist.get_process_group_ranks(mesh.device_mesh.get_group("head"))),
        "loss_rank": mesh.loss_rank,
        "place": dist.get_group_rank(mesh.loss_group, dist.get_rank()),
        "num_loss_ranks": mesh.num_loss_ranks,
    }


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(data=2, context=2),
        Degrees(data=1, context=4, inner_ring=2),
        Degrees(data=2, tensor=2),
        Degrees(data=1, context=2, head=2),
        Degrees(data=1, context=2, head=2, placement="context_first"),
        Degrees(data=2, head=2, placement="context_first"),
    ],
)
def test_mesh(gloo: Pools, degrees: Degrees) -> None:
    for rank, found in enumerate(gloo(4).run(groups, degrees)):
        assert found == {
            "names": degrees.axes,
            "loss": group_of(degrees, rank, *LOSS),
            "data": group_of(degrees, rank, "data"),
            "head": group_of(degrees, rank, "head"),
            "loss_rank": axis_rank(degrees, rank, *LOSS),
            "place": axis_rank(degrees, rank, *LOSS),
            "num_loss_ranks": 4 // degrees.tensor,
        }


def trained(degrees: Degrees, sharding: str) -> tuple[Tensor, Tensor]:
    """A weight after one step on the mean of all ranks' own numbers, and before it."""
    torch.manual_seed(0)
    module = nn.Linear(3, 8, bias=False)
    before = module.weight.detach().clone()
    distribute(module, build_mesh(degrees, "cpu").loss, sharding)  # type: ignore[arg-type]
    module(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    return module.state_dict()["weight"].full_tensor(), before


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
@pytest.mark.parametrize("placement", ["head_first", "context_first"])
def test_parameters_over_the_loss_mesh(gloo: Pools, sharding: str, placement: str) -> None:
    degrees = Degrees(data=1, context=2, head=2, placement=placement)  # type: ignore[arg-type]
    for after, before in gloo(4).run(trained, degrees, sharding):
        torch.testing.assert_close(after, before - 2.5)  # the mean of 1, 2, 3, 4
