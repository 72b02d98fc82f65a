"""Ring attention between real processes: values, gradients and bytes, on groups that do not start at rank 0."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_longctx.attention import close_ring, open_ring
from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.counts import sent_bytes
from lightning_longctx.testing.tolerances import FLOAT64, tolerance
from lightning_longctx.topology.degrees import Degrees
from lightning_longctx.topology.neighbours import CONTEXT, axis_groups
from tests.attention.ring_calls import (
    checkpointed,
    checkpointed_with_kept_keys,
    compiled,
    imported_attention,
    opcheck_on_rank,
    plain_attention,
    ring_attention,
)
from tests.attention.whole import check, inputs, join, oracle, sinks_of

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


@pytest.mark.parametrize(("world", "degrees"), MESHES)
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_values_gradients_and_bytes(gloo, world, degrees, layout):
    length, dtype = 37, torch.float64
    tensors = inputs(length, dtype, batch=2)
    communication = Communication("double_ring")
    results = gloo(world).run(ring_attention, degrees, layout, tensors, communication=communication)
    expected = oracle(*tensors)
    for members in axis_groups(Degrees(**degrees).resolve(world), *CONTEXT):
        check(join([results[rank] for rank in members]), expected, FLOAT64)
    per_token = 2 * 2 * 2 * 8 * 8  # keys and values, batch 2, 2 heads of 8, 8 bytes
    for record, _, sent in results:
        plan = plan_attention(record, communication=communication)
        hops = (*plan.forward.sent, *plan.backward.sent)
        sizes = dict(key_bytes=per_token, gradient_bytes=per_token)
        assert sent == sent_bytes(hops, plan.ring.parcels, record.inner_ring, **sizes)


def test_far_apart_shards_on_two_ranks(gloo):
    """B40 with real messages."""
    key = torch.full((1, 1, 8, 4), 30.0)
    key[:, :, 4:] = -30.0
    tensors = [torch.ones(1, 1, 8, 4), key, torch.arange(32.0).sin().reshape(1, 1, 8, 4), torch.ones(1, 1, 8, 4)]
    for mask in ((True, None), (False, None)):
        results = gloo(2).run(ring_attention, dict(context=2), "contiguous", tensors, mask=mask)
        everything = None if mask[0] else torch.ones(8, 8, dtype=torch.bool)
        for actual, expected in zip(join(results), oracle(*tensors, everything), strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", [plain_attention, imported_attention])
def test_checkpointed_plain_attention_is_recomputed_over_the_ring(gloo, attention):
    """In backward the interception must be open too: otherwise gradients are those of the shard alone."""
    tensors = inputs(16, torch.float64)
    results = gloo(2).run(checkpointed, dict(context=2), "zigzag", tensors, attention)
    check(join(results), oracle(*tensors), FLOAT64)
    assert [result[2] for result in results] == [2, 2]


def test_selective_checkpointing_keeps_out_lse_and_what_came_and_never_repeats_the_ring(gloo):
    """Kept keys are an output of the op: saved with the others, they are there in backward without being sent again."""
    tensors, sinks, degrees = inputs(16, torch.float64), sinks_of(4), dict(context=4, inner_ring=2)
    sent = {}
    for how in ("none", "whole", "selective"):
        results = gloo(4).run(checkpointed_with_kept_keys, degrees, "zigzag", tensors, sinks, how)
        query, key, value, grad = tensors
        out, dquery, *rest = oracle(query * 1.5, key, value, 2 * grad, sinks=sinks)
        check(join(results), (2 * out, 1.5 * dquery, *rest), FLOAT64, how)
        sent[how] = [result[2] for result in results]
    assert sent["selective"] == sent["none"]
    assert all(twice["outer"] > once["outer"] for twice, once in zip(sent["whole"], sent["none"], strict=True))


@pytest.mark.parametrize("keep_kv", [False, True])
def test_compiles_over_a_ring(gloo, keep_kv):
    tensors, sinks, degrees = inputs(16, torch.float64), sinks_of(4), dict(context=4, inner_ring=2)
    results = gloo(4).run(compiled, degrees, "zigzag", tensors, sinks, keep_kv)
    query, key, value, grad = tensors
    out, dquery, *rest = oracle(query * 1.5, key, value, 2 * grad, sinks=sinks)
    check(join(results), (2 * out, 1.5 * dquery, *rest), FLOAT64)


def test_autocast_narrows_like_pytorchs_own_attention(gloo):
    tensors = inputs(16, torch.float32)
    results = gloo(2).run(ring_attention, dict(context=2), "zigzag", tensors, dtype=torch.bfloat16)
    joined = join(results)
    assert joined[0].dtype == torch.bfloat16 and joined[1].dtype == torch.float32
    check(joined, oracle(*tensors), (2 * tolerance(torch.bfloat16), 2 * tolerance(torch.bfloat16, grad=True)))


@pytest.mark.parametrize(("world", "degrees"), [(2, dict(context=2)), (4, dict(context=4, inner_ring=2))])
@pytest.mark.parametrize("keep_kv", [False, True])
def test_the_op_passes_opcheck_between_processes(gloo, world, degrees, keep_kv):
    for result in gloo(world).run(opcheck_on_rank, 16, degrees, keep_kv):
        assert set(result.values()) == {"SUCCESS"}


def names_of_rings():
    degrees = Degrees(context=2).resolve(2)
    names = [open_ring(degrees, dist.get_rank(), timedelta(seconds=60)) for _ in range(2)]
    close_ring(names[0])
    names.append(open_ring(degrees, dist.get_rank(), timedelta(seconds=60)))
    for name in names[1:]:
        close_ring(name)
    return names


def test_a_new_ring_does_not_take_the_name_of_an_open_one(gloo):
    for names in gloo(2).run(names_of_rings):
        assert len(set(names)) == 3
