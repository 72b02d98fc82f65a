"""Ring attention between real processes: values, gradients and bytes, on groups that do not start at rank 0."""

import pytest
import torch

from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.counts import sent_bytes
from lightning_longctx.testing.oracle import gather_shards
from lightning_longctx.testing.tolerances import assert_close_relative, tolerance
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.neighbours import CONTEXT, axis_groups
from tests.attention.ring_calls import (
    checkpointed,
    imported_attention,
    opcheck_on_rank,
    plain_attention,
    ring_attention,
)
from tests.attention.test_loopback_parity import inputs, oracle

MESHES = [
    (2, dict(context=2)),
    (2, dict(context=2, inner_ring=1)),
    (3, dict(context=3)),
    (4, dict(context=4)),
    (4, dict(context=4, inner_ring=2)),
    (4, dict(data=2, context=2)),  # groups {0, 1}, {2, 3}
    (4, dict(context=2, tensor=2)),  # strided groups {0, 2}, {1, 3}
    (8, dict(context=4, inner_ring=2, tensor=2)),
    (8, dict(context=8, inner_ring=4)),
]


def join(results, degrees, layout, length):
    """Full tensors of every context group, each joined over its ranks."""
    shards = plan_attention(length, layout, degrees.context, degrees.inner, 0).shards
    for members in axis_groups(degrees, *CONTEXT):
        group = [results[rank] for rank in members]
        yield [gather_shards([result[index] for result in group], shards, 2) for index in range(4)]


@pytest.mark.parametrize(("world", "degrees"), MESHES)
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_values_gradients_and_bytes(gloo, world, degrees, layout):
    length, dtype = 37, torch.float64
    tensors = inputs(length, dtype, batch=2)
    results = gloo(world).run(ring_attention, degrees, layout, tensors)
    degrees = Degrees(**degrees).resolve(world)
    for joined in join(results, degrees, layout, length):
        for index, (actual, expected) in enumerate(zip(joined, oracle(*tensors), strict=True)):
            assert_close_relative(actual, expected, f"tensor {index}", tolerance(dtype))
    per_token = 2 * 2 * 2 * 8 * 8  # keys and values, batch 2, 2 heads of 8, 8 bytes
    for members in axis_groups(degrees, *CONTEXT):
        for place, rank in enumerate(members):
            plan = plan_attention(length, layout, degrees.context, degrees.inner, place)
            hops = (*plan.forward.sent, *plan.backward.sent)
            planned = sent_bytes(hops, plan.shards, degrees.inner, key_bytes=per_token, gradient_bytes=per_token)
            assert results[rank][4] == planned


def test_far_apart_shards_on_two_ranks(gloo):
    """B40 with real messages."""
    key = torch.full((1, 1, 8, 4), 30.0)
    key[:, :, 4:] = -30.0
    tensors = [torch.ones(1, 1, 8, 4), key, torch.arange(32.0).sin().reshape(1, 1, 8, 4), torch.ones(1, 1, 8, 4)]
    results = gloo(2).run(ring_attention, dict(context=2), "contiguous", tensors)
    (joined,) = join(results, Degrees(1, 2), "contiguous", 8)
    for actual, expected in zip(joined, oracle(*tensors), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", [plain_attention, imported_attention])
def test_checkpointed_plain_attention_is_recomputed_over_the_ring(gloo, attention):
    """In backward the interception must be open too: otherwise gradients are those of the shard alone."""
    tensors = inputs(16, torch.float64)
    results = gloo(2).run(checkpointed, dict(context=2), "zigzag", tensors, attention)
    (joined,) = join(results, Degrees(1, 2), "zigzag", 16)
    for actual, expected in zip(joined, oracle(*tensors), strict=True):
        assert_close_relative(actual, expected, rtol=1e-10)
    assert [result[4] for result in results] == [2, 2]


def test_autocast_narrows_like_pytorchs_own_attention(gloo):
    tensors = inputs(16, torch.float32)
    results = gloo(2).run(ring_attention, dict(context=2), "zigzag", tensors, dtype=torch.bfloat16)
    (joined,) = join(results, Degrees(1, 2), "zigzag", 16)
    assert joined[0].dtype == torch.bfloat16 and joined[1].dtype == torch.float32
    for index, (actual, expected) in enumerate(zip(joined, oracle(*tensors), strict=True)):
        assert_close_relative(actual, expected, rtol=2 * tolerance(torch.bfloat16, grad=index > 0))


def test_the_op_passes_opcheck_between_processes(gloo):
    for result in gloo(2).run(opcheck_on_rank, 16):
        assert set(result.values()) == {"SUCCESS"}
