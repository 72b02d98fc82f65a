"""Replicate x shard: the numbers of one process, one reduction per window, and checkpoints that move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._composable import checkpoint
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_longctx.strategy import ShardingOptions
from lightning_longctx.testing import FLOAT32_WEIGHTS, GlooPool, RankError, assert_all_close_relative
from lightning_longctx.topology import Degrees
from tests.strategy.modules import Plain
from tests.strategy.runs import Run, build, data, fit, trainer, weights
from tests.strategy.test_gradients import assert_same_numbers

Pools = Callable[[int], GlooPool]
PAIRS = ShardingOptions(shard_ranks=2)
HSDP = Run(Degrees(context=2), sharding="hsdp", options=PAIRS, num_samples=8)


@pytest.mark.parametrize(("accumulate", "style"), [(1, "self"), (3, "self"), (1, "manual")])
def test_the_numbers_of_one_process(gloo: Pools, accumulate: int, style: str) -> None:
    assert_same_numbers(gloo, replace(HSDP, accumulate=accumulate, style=style, seed_by_rank=True, tied=True), 4)


def test_one_process_can_be_asked_too(gloo: Pools) -> None:
    assert_same_numbers(gloo, Run(sharding="hsdp"), 1)


def placed(options: ShardingOptions) -> tuple[tuple[str, ...] | None, list[int], bool, list[int]]:
    """Axes of the mesh, ranks that share this one's replica, placements as wanted, and local sizes."""
    module = build(HSDP)
    made = trainer(replace(HSDP, options=options), dist.get_world_size())
    made.validate(module, data(HSDP), verbose=False)
    parameters = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    mesh = parameters[0].device_mesh
    well = all(parameter.placements == (Replicate(), Shard(0)) for parameter in parameters)
    sizes = [parameter.to_local().numel() for parameter in parameters]
    return mesh.mesh_dim_names, dist.get_process_group_ranks(mesh.get_group("shard")), well, sizes


@pytest.mark.parametrize(("shard_ranks", "share"), [(2, 2), ("auto", 4), (1, 1)])
def test_neighbours_share_a_replica(gloo: Pools, shard_ranks: Any, share: int) -> None:
    sizes = [parameter.numel() for parameter in Plain().parameters()]
    for rank, (axes, neighbours, well, local) in enumerate(gloo(4).run(placed, ShardingOptions(shard_ranks))):
        first = rank - rank % share
        assert axes == ("replicate", "shard") and neighbours == list(range(first, first + share)) and well
        assert local == [size // share for size in sizes]


class Counting:
    """Counts reductions of gradients: FSDP2 looks its collectives up in ``torch.distributed`` when it calls them."""

    def __init__(self) -> None:
        self.counts = {"reduce_scatter_single": 0, "all_reduce": 0}

    def __enter__(self) -> Counting:
        self.real = {name: getattr(dist, name) for name in self.counts}
        for name in self.counts:
            setattr(dist, name, self.counting(name))
        return self

    def counting(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else kwargs["output"]
            if tensor.is_floating_point():  # counts of tokens are integers
                self.counts[name] += 1
            return self.real[name](*args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)


def reductions(run: Run) -> dict[str, int]:
    module = build(run)
    with Counting() as counting:
        trainer(run, dist.get_world_size(), max_epochs=1).fit(module, data(run))
    return counting.counts


@pytest.mark.parametrize("sharding", ["replicate", "fsdp", "hsdp"])
def test_gradients_are_reduced_once_per_window(gloo: Pools, sharding: str) -> None:
    """Two windows of two micro-batches each; gradients of two blocks and of the root travel by themselves."""
    options = PAIRS if sharding == "hsdp" else ShardingOptions()
    run = replace(HSDP, sharding=sharding, options=options, accumulate=2)
    scattered, reduced = (sharding != "replicate", sharding != "fsdp")
    for counts in gloo(4).run(reductions, run):
        assert counts == {"reduce_scatter_single": 6 * scattered, "all_reduce": 6 * reduced}


class Recomputed(Plain):
    """Every block is run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            checkpoint(block)


def evaluated(run: Run) -> dict[str, Tensor]:
    """Weights of a run that validates after every second batch, in the middle of a window, and then goes on."""
    torch.manual_seed(7)
    module = Recomputed()
    made = trainer(run, dist.get_world_size(), val_check_interval=2, num_sanity_val_steps=1)
    made.fit(module, data(run), data(run))
    made.validate(module, data(run), verbose=False)
    made.fit_loop.max_epochs = 2
    made.fit(module, data(run), data(run))
    return weights(module)


def twice(run: Run) -> dict[str, Tensor]:
    module = build(run)
    trainer(run, dist.get_world_size(), max_epochs=2).fit(module, data(run))
    return weights(module)


@pytest.mark.parametrize("sharding", [pytest.param("fsdp", marks=pytest.mark.exhaustive), "hsdp"])
def test_kept_parameters_are_the_same_parameters(gloo: Pools, sharding: str) -> None:
    """``reshard_after_forward=False`` under accumulation, evaluation between steps, and recomputation: bit-equal."""
    ranks = 2 if sharding == "hsdp" else "auto"
    run = replace(HSDP, sharding=sharding, accumulate=3)
    freed, kept = (replace(run, options=ShardingOptions(ranks, reshard)) for reshard in (True, False))
    expected = gloo(4).run(twice, freed)[0]
    found = gloo(4).run(evaluated, kept)[0]
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


class Adam(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)  # a large eps does not amplify rounding


def train(run: Run, epochs: int, save: Path | None, resume: Path | None) -> dict[str, Tensor]:
    torch.manual_seed(7)
    module = Adam(tied=True)
    made = trainer(run, dist.get_world_size(), max_epochs=epochs)
    made.fit(module, data(run), ckpt_path=resume)
    if save is not None:
        made.save_checkpoint(save)
    return weights(module)


KEPT = {
    "hsdp": (4, Run(Degrees(context=4), sharding="hsdp", options=PAIRS)),
    "fsdp": (2, Run(Degrees(context=2), sharding="fsdp")),
    "replicate": (2, Run(Degrees(context=2))),
    "one process": (1, Run()),
}


@pytest.mark.parametrize(("first", "then"), [("hsdp", "fsdp"), ("hsdp", "replicate"), ("fsdp", "hsdp")])
def test_checkpoints_move(gloo: Pools, tmp_path: Path, first: str, then: str) -> None:
    path = tmp_path / "half.ckpt"
    whole = gloo(1).run(train, KEPT["one process"][1], 2, None, None)[0]
    world, run = KEPT[first]
    gloo(world).run(train, run, 1, path, None)
    world, run = KEPT[then]
    resumed = gloo(world).run(train, run, 2, None, path)[0]
    assert_all_close_relative(resumed, whole, "weights", FLOAT32_WEIGHTS)


def reused(first: Run, then: Run) -> None:
    module = build(first)
    trainer(first, dist.get_world_size()).fit(module, data(first))
    trainer(then, dist.get_world_size()).validate(module, data(then), verbose=False)


def test_a_module_is_reused_only_in_the_way_it_was_distributed(gloo: Pools) -> None:
    fsdp = Run(Degrees(context=2), sharding="fsdp")
    gloo(2).run(reused, fsdp, fsdp)
    kept = replace(fsdp, options=ShardingOptions(reshard_after_forward=False))
    for other in (replace(fsdp, sharding="replicate"), replace(fsdp, sharding="hsdp"), kept):
        with pytest.raises(RankError, match="is a DTensor already: .* other degrees or another sharding") as caught:
            gloo(2).run(reused, fsdp, other)
        assert len(caught.value.failures) == 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(gloo: Pools, precision: str) -> None:
    run = replace(HSDP, precision=precision, accumulate=2, clip=1.0)
    alone = replace(run, degrees=Degrees(), options=ShardingOptions(), accumulate=4)
    norms, expected = gloo(1).run(fit, alone)[0]
    found_norms, found = gloo(4).run(fit, run)[0]
    assert found["head.weight"].dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert found_norms == pytest.approx(norms, rel=2e-2)
    assert_all_close_relative(found, expected, "weights", 2e-2)
