"""Process groups agree with the pure functions that describe them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import AXES, LOSS, Degrees, axis_rank, group_of
from lightning_longctx.topology.mesh import build_mesh

Pools = Callable[[int], GlooPool]


def groups(degrees: Degrees) -> dict[str, object]:
    mesh = build_mesh(degrees, "cpu")
    return {
        "names": mesh.device_mesh.mesh_dim_names,
        "loss": tuple(dist.get_process_group_ranks(mesh.loss_group)),
        "data": tuple(dist.get_process_group_ranks(mesh.data_group)),
        "loss_rank": mesh.loss_rank,
        "num_loss_ranks": mesh.num_loss_ranks,
    }


@pytest.mark.parametrize(
    "degrees", [Degrees(data=2, context=2), Degrees(data=1, context=4, inner_ring=2), Degrees(data=2, tensor=2)]
)
def test_mesh(gloo: Pools, degrees: Degrees) -> None:
    for rank, found in enumerate(gloo(4).run(groups, degrees)):
        assert found == {
            "names": AXES,
            "loss": group_of(degrees, rank, *LOSS),
            "data": group_of(degrees, rank, "data"),
            "loss_rank": axis_rank(degrees, rank, *LOSS),
            "num_loss_ranks": 4 // degrees.tensor,
        }
