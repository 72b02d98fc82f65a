"""Norm and clipping of gradients on several meshes at once, against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from lightning_longctx.strategy.gradients.norms import clip_by_norm, clip_by_value, gradient_norm, own_part, whole
from lightning_longctx.strategy.parameters.sharding import distribute
from lightning_longctx.testing import GlooPool, RankError
from lightning_longctx.topology import Degrees
from lightning_longctx.topology.mesh import build_mesh

Pools = Callable[[int], GlooPool]
WIDTH, CLIP_NORM, CLIP_VALUE = 6, 0.3, 0.05


@dataclass(frozen=True)
class Layout:
    """How parameters are kept: whose mesh has how many axes."""

    sharding: str
    tensor: int
    shard_ranks: int | None = None
    rows: int = 33


class Toy(nn.Module):
    """One matrix by rows and one by columns of tensor ranks; a vector that all of them have; one that is never used."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, WIDTH))
        self.columns = nn.Parameter(torch.randn(WIDTH, rows))
        self.vector = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, inputs: Tensor) -> Tensor:
        parts = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.rows, self.columns))
        rows, columns = parts
        return (inputs @ rows.t()).square().mean(0).sum() + (inputs @ columns).square().mean(0).sum()


class Whole(nn.Module):
    """What is distributed: the toy's matrices are cut by tensor ranks, which each add their part of the loss."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.toy = Toy(rows)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.toy(inputs) + self.head(inputs * self.toy.vector).square().mean()


def gradients(layout: Layout) -> tuple[Whole, Tensor]:
    """The same numbers on one process as on many: gradients of a mean over everyone's inputs."""
    torch.manual_seed(0)
    module, inputs = Whole(layout.rows), torch.randn(4, 5, WIDTH)
    return module, inputs


def alone(layout: Layout) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Norm, gradients clipped by norm and clipped by value, as PyTorch does it on plain tensors."""
    clipped = []
    norm = torch.zeros(())
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        module, inputs = gradients(layout)
        torch.stack([module(part) for part in inputs]).mean().backward()
        norm = nn.utils.get_total_norm([weight.grad for weight in module.parameters() if weight.grad is not None])
        clip(module.parameters(), CLIP_NORM if clip is nn.utils.clip_grad_norm_ else CLIP_VALUE)
        clipped.append({name: w.grad for name, w in module.named_parameters() if w.grad is not None})
    return float(norm), clipped[0], clipped[1]


def spread(layout: Layout) -> tuple[float, list[float], dict[str, Tensor], dict[str, Tensor], int]:
    """The same on a mesh: norm, norms of all ranks, clipped gradients, and on how many meshes gradients live."""
    degrees = Degrees(tensor=layout.tensor).resolve(dist.get_world_size())
    mesh = build_mesh(degrees, "cpu", layout.shard_ranks)
    clipped, norm, meshes = [], torch.zeros(()), set()
    for clip in ("norm", "value"):
        module, inputs = gradients(layout)
        if layout.tensor > 1:
            for name, dim in (("rows", 0), ("columns", 1)):
                cut = distribute_tensor(getattr(module.toy, name).detach(), mesh.device_mesh["tensor"], [Shard(dim)])
                setattr(module.toy, name, nn.Parameter(cut))
        distribute(module, mesh.parameters, layout.sharding)  # type: ignore[arg-type]
        mine = inputs.chunk(mesh.num_loss_ranks)[mesh.loss_rank]
        torch.stack([module(part) for part in mine]).mean().backward()
        parameters = list(module.parameters())
        meshes = {weight.grad.device_mesh.mesh_dim_names for weight in parameters if weight.grad is not None}  # type: ignore
        norm = gradient_norm(parameters)
        if clip == "norm":
            clip_by_norm(parameters, CLIP_NORM, float(norm))
            assert float(gradient_norm(parameters)) == pytest.approx(CLIP_NORM, rel=1e-5)
        else:
            clip_by_value(parameters, CLIP_VALUE)
        clipped.append({name: whole(w.grad) for name, w in module.named_parameters() if w.grad is not None})
    norms = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    return float(norm), [float(one) for one in norms], clipped[0], clipped[1], len(meshes)


LAYOUTS = [
    (1, Layout("replicate", 1)),
    (2, Layout("replicate", 2)),
    (2, Layout("fsdp", 2, rows=7)),
    (2, Layout("fsdp", 1)),
    (4, Layout("replicate", 2)),
    (4, Layout("fsdp", 2)),
    (4, Layout("fsdp", 2, rows=3)),
    (4, Layout("hsdp", 1, shard_ranks=2)),
    pytest.param(8, Layout("hsdp", 2, shard_ranks=2), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_norm_and_clipping_are_those_of_one_process(gloo: Pools, world: int, layout: Layout) -> None:
    norm, by_norm, by_value = alone(layout)
    assert norm > 2 * CLIP_NORM
    for found, everyone, found_by_norm, found_by_value, num_meshes in gloo(world).run(spread, layout):
        assert found == pytest.approx(norm, rel=1e-6)
        assert set(everyone) == {found}, "the same bits on all ranks"
        assert num_meshes == (2 if layout.tensor > 1 else 1)
        for expected, actual in ((by_norm, found_by_norm), (by_value, found_by_value)):
            assert expected.keys() == actual.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(actual[name], gradient, rtol=2e-6, atol=1e-7, msg=name)


def test_plain_tensors_need_no_processes() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 4, 5)]
    assert float(gradient_norm(parameters)) == 0
    parameters[0].grad, parameters[2].grad = torch.full((3,), 2.0), torch.full((5,), -1.0)
    assert float(gradient_norm(iter(parameters))) == pytest.approx(17**0.5)
    clip_by_norm(parameters, 100.0, 17**0.5)
    assert parameters[0].grad.tolist() == [2.0] * 3, "below the limit nothing is touched"
    clip_by_value(parameters, 1.5)
    assert parameters[0].grad.tolist() == [1.5] * 3 and parameters[2].grad.tolist() == [-1.0] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_norms_of_narrow_gradients_are_computed_wide(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(1000, dtype=dtype))
    parameter.grad = torch.full((1000,), 1.5, dtype=dtype)
    norm = gradient_norm([parameter])
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    assert float(norm) == pytest.approx(1.5 * 1000**0.5, rel=1e-6)


def test_a_norm_that_is_no_number_spreads() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    clip_by_norm([parameter], 1.0, float("nan"))
    assert parameter.grad.isnan().all()


def partial_gradient() -> Any:
    mesh = build_mesh(Degrees(data=2), "cpu").loss
    return own_part(DTensor.from_local(torch.ones(2), mesh, [Partial()]), 2)


def test_sums_that_are_still_to_be_taken_are_refused(gloo: Pools) -> None:
    with pytest.raises(RankError, match="its sum over ranks is still to be taken"):
        gloo(2).run(partial_gradient)
