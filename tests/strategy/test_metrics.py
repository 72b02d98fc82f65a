"""torchmetrics where tensor ranks see the same tokens: counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_longctx.strategy.gradients.metrics import release_metrics, share_metrics
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees
from lightning_longctx.topology.mesh import build_mesh

Pools = Callable[[int], GlooPool]


class Metered(nn.Module):
    """Metrics as attributes, nested, in a collection; one that has a group of its own."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.total = SumMetric()
        self.part = nn.ModuleDict({"mean": MeanMetric(), "all": MetricCollection([SumMetric()])})
        self.own = SumMetric(process_group=own)


def metered(degrees: Degrees) -> tuple[float, float, float, float]:
    """Sums of 1, 2, ... by place among the ranks that hold different tokens, and their mean weighted alike."""
    mesh = build_mesh(degrees.resolve(dist.get_world_size()), "cpu")
    alone = mesh.device_mesh.get_group("tensor")
    module = Metered(alone)
    changed = share_metrics(module, mesh.loss_group)
    assert len(changed) == 3 and module.own.process_group is alone
    assert not share_metrics(module, mesh.loss_group), "once is enough"
    value = float(1 + mesh.loss_rank)
    metrics: list[Any] = [module.total, module.own, module.part["all"]]
    for metric in metrics:
        metric.update(value)
    cast("MeanMetric", module.part["mean"]).update(value, value)
    found = (module.total, module.part["mean"], module.part["all"]["SumMetric"], module.own)  # type: ignore[index]
    results = tuple(float(metric.compute()) for metric in found)
    release_metrics(changed)
    assert module.total.process_group is None and module.total.clone() is not None
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(context=2, tensor=2), Degrees(head=2, tensor=2)])
def test_tensor_ranks_count_once(gloo: Pools, degrees: Degrees) -> None:
    for rank, (total, mean, nested, own) in enumerate(gloo(4).run(metered, degrees)):
        assert total == nested == 3
        assert mean == pytest.approx(5 / 3)
        assert own == 2 * (1 + rank // 2), "a group of its own is left alone"


def test_torch_is_asked_for_nothing_else() -> None:
    module = Metered(None)
    module.own.process_group = group = object()
    wanted: Any = object()
    assert share_metrics(module, wanted) == [module.total, module.part["mean"], module.part["all"]["SumMetric"]]  # type: ignore
    assert module.own.process_group is group and torch.is_tensor(module.total.sum_value)
