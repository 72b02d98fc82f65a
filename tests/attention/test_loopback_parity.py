"""Ring attention on all ranks in lockstep against plain masked softmax, where the grid does not go.

Uneven and empty shards, tiny documents and long ones, narrow dtypes on the wire and off it, and known traps.
"""

import pytest
import torch

from lightning_longctx.plan.choose import plan_attention
from lightning_longctx.plan.communication import SCHEDULES, Communication
from lightning_longctx.plan.counts import sent_bytes
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.sequence.layout import LAYOUTS
from lightning_longctx.testing.lockstep import LoopbackTransport
from lightning_longctx.testing.loopback import Mesh, attention_over_ranks
from lightning_longctx.testing.tolerances import FLOAT64, relative_error, tolerance
from tests.attention.whole import check, dense, inputs, oracle, rms_errors, sinks_of

RINGS = [(1, 1), (2, 1), (3, 3), (16, 4)]


def tolerances(dtype):
    return tolerance(dtype), tolerance(dtype, grad=True)


def both(tensors, mesh, mask=CAUSAL, sinks=None, **kwargs):
    """Over ranks, and in one process."""
    result = attention_over_ranks(*tensors, mesh, mask=mask, sinks=sinks, **kwargs)
    rule = dense(tensors[0].shape[2], mask, mesh.documents, mesh.num_rows)
    return result, oracle(*tensors, rule, sinks, kwargs.get("scale"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "inner"), RINGS)
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_both_backends(layout, num_ranks, inner, backend):
    for mask in (Mask(), Mask(causal=False), Mask(window=9)):
        results = both(inputs(32, torch.float64, batch=2), Mesh(layout, num_ranks, inner), mask, backend=backend)
        check(*results, FLOAT64, mask)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "inner"), [(2, 2), (4, 2), (8, 4)])
@pytest.mark.parametrize("length", [1, 5, 37])
def test_uneven_and_empty_shards(layout, schedule, num_ranks, inner, length):
    tensors, sinks = inputs(length, torch.float64), sinks_of(4)
    for keep_kv in (False, True):
        mesh = Mesh(layout, num_ranks, inner, communication=Communication(schedule, keep_kv))
        for mask in (Mask(), Mask(causal=False), Mask(window=6)):
            check(*both(tensors, mesh, mask, sinks), FLOAT64, f"{mask} keep_kv={keep_kv}")


PACKED = {
    "single tokens": tuple(range(0, 38)),
    "over many ranks": (0, 1, 36, 37),
    "first and last alone": (0, 1, 2, 35, 36, 37),
    "shorter than the ranks": (0, 2, 5, 6, 10, 13, 17, 18, 24, 31, 37),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", PACKED)
@pytest.mark.parametrize(("num_ranks", "inner"), [(3, 3), (8, 4)])
def test_documents_of_every_length(layout, documents, num_ranks, inner):
    """37 tokens: shards are uneven too, and under ``balanced`` some ranks hold no part of a long document."""
    tensors = inputs(37, torch.float64)
    for mask in (Mask(), Mask(causal=False), Mask(window=4)):
        mesh = Mesh(layout, num_ranks, inner, documents=PACKED[documents])
        check(*both(tensors, mesh, mask), FLOAT64, mask)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_with_their_own_documents(layout):
    """Three rows of 13: one whole, one of single tokens, one of both."""
    documents = (0, *range(13, 27), 30, 38, 39)
    mesh = Mesh(layout, 4, 2, documents=documents, num_rows=3)
    for mask in (Mask(), Mask(causal=False), Mask(window=3)):
        check(*both(inputs(13, torch.float64, batch=3), mesh, mask, sinks_of(4)), FLOAT64, mask)


def test_documents_that_are_not_isolated_see_each_other():
    """What a plain causal call means: rows stay apart, their documents do not."""
    documents = (0, 5, 12, 24, 32, 40, 48)
    tensors = inputs(24, torch.float64, batch=2)
    for layout in LAYOUTS:
        mesh = Mesh(layout, 4, 2, documents=documents, num_rows=2)
        result = attention_over_ranks(*tensors, mesh, mask=Mask(isolate=False))
        check(result, oracle(*tensors), FLOAT64, layout)


@pytest.mark.parametrize("window", [1, 2, 8, 9, 31, 32, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_of_every_width(layout, window):
    """From the query alone to more than there is, over shards of 8."""
    check(*both(inputs(32, torch.float64), Mesh(layout, 4, 2), Mask(window=window), sinks_of(4)), FLOAT64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_narrow_dtypes(dtype, backend):
    result, expected = both(inputs(64, dtype), Mesh("zigzag", 4, 2), backend=backend)
    assert result.out.dtype == dtype
    check(result, expected, tolerances(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "inner"), [(4, 2), (8, 4)])
@pytest.mark.parametrize("length", [64, 37])
@pytest.mark.parametrize("wire", [None, "bfloat16", "float32"])
def test_sent_bytes_equal_planned_bytes(layout, num_ranks, inner, length, wire):
    """Without a wire dtype bfloat16 keys travel as they are, and their gradients in float32."""
    query, key, value, grad = inputs(length, torch.bfloat16)
    mesh = Mesh(layout, num_ranks, inner, communication=Communication("double_ring", dtype=wire))
    result = attention_over_ranks(query, key, value, grad, mesh)
    per_token = 2 * key.shape[1] * key.shape[3]
    sizes = {None: (2, 4), "bfloat16": (2, 2), "float32": (4, 4)}[wire]
    for counted, (record,) in zip(result.sent_bytes, mesh.records(length), strict=True):
        plan = plan_attention(record, communication=mesh.communication)
        hops = (*plan.forward.sent, *plan.backward.sent)
        keys, gradients = (size * per_token for size in sizes)
        assert counted == sent_bytes(hops, plan.ring.parcels, inner, key_bytes=keys, gradient_bytes=gradients)


BFLOAT16_CASES = [
    ("zigzag", Mask(), (), "double_ring"),
    ("contiguous", Mask(causal=False), (), "direct"),
    ("striped", Mask(window=40), (), "all_gather"),
    ("document_zigzag", Mask(), (0, 1, 40, 100, 128), "double_ring"),
    ("balanced", Mask(window=40), (0, 30, 120, 128), "direct"),
]


@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize(("layout", "mask", "documents", "schedule"), BFLOAT16_CASES)
def test_bfloat16_error_does_not_grow_with_ring_size(backend, layout, mask, documents, schedule):
    """B42: partial results are merged in float32: many hops are little worse than one shot, and 8 no worse than 2.

    One shot is PyTorch's own op in one process. Kernels round every partial result once; sums in bfloat16 would be
    three times as far off at 8 ranks as at 2.
    """
    tensors = inputs(128, torch.bfloat16, heads=2, kv_heads=2, width=16)

    def errors(num_ranks, inner, backend=backend):
        mesh = Mesh(layout, num_ranks, inner, documents=documents, communication=Communication(schedule))
        return rms_errors(*both(tensors, mesh, mask, backend=backend))

    once, two, eight, double = errors(1, 1, "aten"), errors(2, 2), errors(8, 8), errors(8, 4)
    for many in (two, eight, double):
        assert all(there <= 1.5 * here for there, here in zip(many, once, strict=True))
    for many in (eight, double) if layout != "balanced" else ():  # on 2 ranks that cuts hardly a document
        assert all(there <= 1.25 * here for there, here in zip(many, two, strict=True))
    if (layout, mask) == ("zigzag", Mask()):
        exact = oracle(*tensors)[0]
        (rounding,) = rms_errors([exact.to(torch.bfloat16)], [exact])
        assert max(two[0], eight[0], double[0]) <= 1.5 * rounding


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_bfloat16_wire_costs_a_rounding_of_what_travels(schedule, keep_kv):
    """Keys and values are rounded once, however far they go; a sum of gradients once for each hop, at most 8."""
    tensors = inputs(64, torch.float32)
    expected, unit = oracle(*tensors), 2.0**-9  # half a unit in the last place

    def errors(num_ranks, inner):
        communication = Communication(schedule, keep_kv, "bfloat16")
        result = attention_over_ranks(*tensors, Mesh("zigzag", num_ranks, inner, communication=communication))
        assert result.out.dtype == torch.float32
        return [relative_error(*pair) for pair in zip(result, expected, strict=False)][:4]

    two, eight = errors(2, 2), errors(8, 4)
    assert all(1e-5 < error for error in two), "nothing was rounded"
    assert all(error < 2 * unit for error in two)
    assert all(many < 2 * few for many, few in zip(eight[:2], two[:2], strict=True))
    assert all(many < few + 8 * unit for many, few in zip(eight[2:], two[2:], strict=True))


def test_a_wire_as_wide_as_the_inputs_changes_nothing():
    tensors, sinks = inputs(64, torch.float32), sinks_of(4, torch.float32)
    for schedule in SCHEDULES:
        for keep_kv in (False, True):
            plain, wide = (
                attention_over_ranks(
                    *tensors, Mesh("zigzag", 8, 4, communication=Communication(schedule, keep_kv, dtype)), sinks=sinks
                )
                for dtype in (None, "float32")
            )
            assert all(torch.equal(a, b) for a, b in zip(plain[:5], wide[:5], strict=True))
            assert plain.sent_bytes == wide.sent_bytes


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_with_far_apart_logits_merge_exactly(causal, backend, num_ranks):
    """B40: the lse of two shards differ by 120; log(1 + exp(x)) would overflow and give 0, still finite."""
    key = torch.full((1, 1, 8, 4), 30.0)
    key[:, :, 4:] = -30.0
    tensors = torch.ones(1, 1, 8, 4), key, torch.arange(32.0).sin().reshape(1, 1, 8, 4), torch.ones(1, 1, 8, 4)
    result, expected = both(tensors, Mesh("contiguous", num_ranks, 2), Mask(causal=causal), backend=backend)
    for index in range(4):
        allowed = 2e-5 if index else 1e-5  # a gradient that should be 0 is a sum of terms of size 30
        torch.testing.assert_close(result[index].double(), expected[index], rtol=1e-5, atol=allowed)


@pytest.mark.parametrize("sink", [-100.0, 0.0, 100.0])
def test_sinks_far_from_the_logits(sink):
    """B40's kind: a sink that takes nothing, and one that takes all but nothing."""
    tensors, sinks = inputs(16, torch.float64), torch.full((4,), sink, dtype=torch.float64)
    result, expected = both(tensors, Mesh("zigzag", 4, 2), sinks=sinks)
    check(result, expected, FLOAT64)


def test_backward_uses_the_final_lse_and_all_blocks():
    """B43: scaled logits, 3 and 4 ranks, as many heads as local tokens, transposed views of one fused tensor."""
    for num_ranks, length, heads in ((3, 12, 2), (4, 12, 3)):
        fused = inputs(length, torch.float64, heads=3 * heads, kv_heads=1, seed=1, scale=1.5)[0]
        query, key, value = fused.transpose(1, 2).chunk(3, dim=2)
        views = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        grad = inputs(length, torch.float64, heads=heads, seed=2)[0]
        for schedule in SCHEDULES:
            mesh = Mesh("contiguous", num_ranks, num_ranks, communication=Communication(schedule))
            check(*both((*views, grad), mesh), FLOAT64, schedule)


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("layout", ["zigzag", "document_zigzag"])
def test_large_keys_and_values_travel_apart(monkeypatch, layout, keep_kv, wire):
    """What is small is one message; what is large two, which are not copied. The numbers are the same."""
    tensors = inputs(48, torch.float32, batch=2)
    mesh = Mesh(layout, 4, 2, documents=(0, 5, 30, 48), communication=Communication(keep_kv=keep_kv, dtype=wire))
    together = attention_over_ranks(*tensors, mesh)
    monkeypatch.setattr(LoopbackTransport, "small_bytes", lambda *_: 0)
    apart = attention_over_ranks(*tensors, mesh)
    for one, other in zip(together[:4], apart[:4], strict=True):
        assert torch.equal(one, other)
    assert together.sent_bytes == apart.sent_bytes


@pytest.mark.parametrize("mask", [Mask(), Mask(window=300), Mask(window=64)])
@pytest.mark.parametrize("documents", [(), (0, 300, 301, 700, 1000)])
@pytest.mark.parametrize(("layout", "num_ranks"), [("contiguous", 1), ("zigzag", 2), ("balanced", 4)])
def test_tiles_of_one_long_row_are_stacked(layout, num_ranks, documents, mask):
    """Several tiles go to the kernel in one call only where the batch is one row and long enough to be cut."""
    tensors = inputs(1000, torch.float64, heads=2, kv_heads=1, width=8)
    check(*both(tensors, Mesh(layout, num_ranks, min(num_ranks, 2), documents=documents), mask), FLOAT64, mask)
