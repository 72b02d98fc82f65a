"""Which ways to keep parameters there are, and what is refused; no process is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_longctx.strategy import LongContextStrategy, ShardingOptions
from lightning_longctx.strategy.parameters.sharding import check_dtypes, precision_policy
from lightning_longctx.strategy.parameters.sharding_options import Distribution, check_sharding, resolve_sharding
from lightning_longctx.topology import Degrees
from tests.strategy.runs import QUIET

EIGHT = Degrees(data=2, context=2, head=2)


@pytest.mark.parametrize("wrong", [0, -1, True, "all", 2.0])
def test_shard_ranks_is_a_number_or_auto(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"sharding_options.shard_ranks=.* must be a positive integer or auto"):
        ShardingOptions(shard_ranks=wrong)


@pytest.mark.parametrize(
    ("sharding", "options", "message"),
    [
        ("ddp", ShardingOptions(), "sharding='ddp' is unknown; choose replicate, fsdp or hsdp"),
        ("fsdp", ShardingOptions(shard_ranks=4), "shard_ranks=4 needs sharding=hsdp, but sharding=fsdp"),
        ("replicate", ShardingOptions(shard_ranks=4), "shard_ranks=4 needs sharding=hsdp, but sharding=replicate"),
        ("replicate", ShardingOptions(cpu_offload=True), "cpu_offload=True needs sharding=fsdp or hsdp"),
        ("replicate", ShardingOptions(reshard_after_forward=False), "reshard_after_forward=False needs sharding=fsdp"),
    ],
)
def test_options_that_would_be_ignored(sharding: Any, options: ShardingOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongContextStrategy(sharding=sharding, sharding_options=options)


@pytest.mark.parametrize("sharding", ["replicate", "fsdp", "hsdp"])
def test_defaults_go_with_every_sharding(sharding: Any) -> None:
    check_sharding(sharding, ShardingOptions())


@pytest.mark.parametrize(
    ("sharding", "shard_ranks", "degrees", "num_devices", "expected"),
    [
        ("replicate", "auto", EIGHT, 8, 1),
        ("fsdp", "auto", EIGHT, 8, 8),
        ("hsdp", "auto", EIGHT, 8, 8),
        ("hsdp", "auto", EIGHT, 4, 4),
        ("hsdp", 2, EIGHT, 8, 2),
        ("hsdp", "auto", Degrees(data=4, tensor=2), 4, 2),
        ("fsdp", "auto", Degrees(data=4, tensor=2), 4, 4),
        ("hsdp", 1, Degrees(data=1), 1, 1),
    ],
)
def test_how_many_ranks_share_a_replica(
    sharding: Any, shard_ranks: Any, degrees: Degrees, num_devices: int, expected: int
) -> None:
    found = resolve_sharding(sharding, ShardingOptions(shard_ranks), degrees, num_devices, "cuda")
    num_ranks = 8 // degrees.tensor if degrees != Degrees(data=1) else 1
    assert found == Distribution(sharding, num_ranks, degrees.tensor, expected)


@pytest.mark.parametrize(
    ("options", "degrees", "num_devices", "message"),
    [
        (ShardingOptions(3), EIGHT, 8, r"shard_ranks=3 does not divide the 8 ranks .* Use one of \[1, 2, 4, 8\]"),
        (ShardingOptions(), Degrees(data=3), 2, r"shard_ranks=auto \(2, those of one node\) does not divide the 3"),
        (ShardingOptions(), Degrees(data=3, tensor=2), 3, "tensor=2 does not divide the 3 processes of a node"),
    ],
)
def test_ranks_that_do_not_fit(options: ShardingOptions, degrees: Degrees, num_devices: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_sharding("hsdp", options, degrees, num_devices, "cuda")


def test_the_trainer_refuses_before_anything_starts() -> None:
    """Every process makes its Trainer, so every one of them says it."""
    strategy = LongContextStrategy(sharding="hsdp", sharding_options=ShardingOptions(3))
    with pytest.raises(ValueError, match="shard_ranks=3 does not divide the 4 ranks"):
        Trainer(strategy=strategy, devices=4, **QUIET)  # type: ignore[arg-type]
    strategy = LongContextStrategy(sharding="fsdp", sharding_options=ShardingOptions(cpu_offload=True))
    with pytest.raises(ValueError, match=r"cpu_offload=True moves parameters .* trainer.accelerator=cpu keeps them"):
        Trainer(strategy=strategy, devices=1, **QUIET)  # type: ignore[arg-type]
    assert not torch.distributed.is_initialized()


def test_gradients_of_narrow_weights_are_added_in_float32_and_nothing_is_cast() -> None:
    for dtypes in ({torch.float32}, {torch.float64}):
        policy = precision_policy(dtypes)
        assert policy.param_dtype is policy.reduce_dtype is policy.output_dtype is None
    for dtype in (torch.bfloat16, torch.float16):
        policy = precision_policy({dtype})
        assert (policy.param_dtype, policy.reduce_dtype) == (None, torch.float32)


def test_a_block_of_two_dtypes_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2).double())
    with pytest.raises(ValueError, match=r"parameter 0.weight is torch.float32 and 1.weight is torch.float64"):
        check_dtypes(module, [module])
    check_dtypes(module, [module[0], module])
    module[1].requires_grad_(False)
    check_dtypes(module, [module])
