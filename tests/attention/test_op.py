"""The public entry and its custom ops on one rank: PyTorch's own numbers, opcheck, compile, and clear refusals."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_longctx.attention import attend
from lightning_longctx.attention.dropout import drawn
from lightning_longctx.attention.op import rings_run
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.testing.oracle import attention_oracle
from lightning_longctx.testing.tolerances import FLOAT64, assert_close_relative
from tests.attention.ring_calls import RING_FORWARD, selective
from tests.attention.whole import check, dense, inputs, oracle, sinks_of


def leaves(length=16, dtype=torch.float32, **kwargs):
    return [tensor.requires_grad_() for tensor in inputs(length, dtype, **kwargs)[:3]]


def test_one_rank_is_pytorchs_causal_attention():
    query, key, value = leaves()
    ours, theirs = (
        attend(query, key, value),
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
    )
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(out, (query, key, value), grad) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(window=4)])
@pytest.mark.parametrize("documents", [(), (0, 5, 6, 16)])
def test_one_rank_is_the_formula(sinks, mask, documents):
    tensors = inputs(16, torch.float64, batch=2)
    logits = sinks_of(4) if sinks else None
    record = SequenceRecord(16, documents=documents)
    found = differentiated(tensors, record, logits, mask)
    check(found, oracle(*tensors, dense(16, mask, documents), logits), FLOAT64)


def differentiated(tensors, record, sinks=None, mask=CAUSAL, call=attend):
    """Out, dq, dk, dv and, with sinks, dsinks."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    if sinks is not None:
        leaves.append(sinks.clone().requires_grad_())
    extra = leaves[3] if sinks is not None else None
    out = call(*leaves[:3], sequence=record, causal=mask.causal, window=mask.window, sinks=extra)
    return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])


def test_gradcheck():
    assert torch.autograd.gradcheck(attend, leaves(6, torch.float64, heads=2, kv_heads=1, width=3))


def test_gradcheck_with_sinks_and_a_window():
    def windowed(query, key, value, sinks):
        return attend(query, key, value, sinks=sinks, window=3)

    sinks = sinks_of(2).requires_grad_()
    assert torch.autograd.gradcheck(windowed, [*leaves(6, torch.float64, heads=2, kv_heads=1, width=3), sinks])


@pytest.mark.parametrize("documents", [(), (0, 3, 16)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(
    ("window", "softcap", "p"), [(None, None, 0.0), (5, None, 0.0), (None, 2.0, 0.0), (5, 2.0, 0.3)]
)
def test_opcheck(documents, sinks, token_major, window, softcap, p):
    """Also that strides are those that the fakes say, whatever those of the inputs: a compiled graph relies on them."""
    tensors = inputs(16, torch.float32)
    draw = drawn(1, 0) if p else None
    if token_major:
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    *qkv, grad = tensors
    logits = sinks_of(4, torch.float32).requires_grad_() if sinks else None
    place, options = (
        (SequenceRecord(16, documents=documents).encode(), "", "auto"),
        (0.3, True, window, True, softcap, p, draw),
    )
    leaves = [tensor.requires_grad_() for tensor in qkv]
    result = torch.library.opcheck(RING_FORWARD, (*leaves, logits, *place, *options, False))
    assert set(result.values()) == {"SUCCESS"}
    detached = [tensor.detach() for tensor in qkv]
    logits = None if logits is None else logits.detach()
    saved = RING_FORWARD(*detached, logits, *place, *options, False)
    arguments = (grad, *detached, logits, place[0], *saved, *place[1:], *options)
    result = torch.library.opcheck(torch.ops.longctx.ring_attention_backward.default, arguments)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("sinks", [False, True])
def test_compiles(compiler, sinks):
    """Documents, a window and sinks; values and gradients are those of eager mode."""
    tensors, logits = inputs(16, torch.float64), sinks_of(4) if sinks else None
    torch.compiler.reset()
    compiled = torch.compile(lambda *args, **kwargs: attend(*args, **kwargs) * 1.0, backend=compiler)
    record, mask = SequenceRecord(16, documents=(0, 3, 16)), Mask(window=5)
    for actual, expected in zip(
        differentiated(tensors, record, logits, mask, compiled),
        differentiated(tensors, record, logits, mask),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("sinks", [False, True])
def test_checkpointing_gives_the_same_gradients(sinks):
    tensors, logits, record = inputs(16, torch.float64), sinks_of(4) if sinks else None, SequenceRecord(16)

    def recomputed(*args, **kwargs):
        return checkpoint(attend, *args, use_reentrant=False, **kwargs)

    pairs = (differentiated(tensors, record, logits, call=call) for call in (recomputed, attend))
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_selective_checkpointing_keeps_the_output_and_never_repeats_the_ring():
    """The reason for one op: a policy can name it, and recomputation takes its saved result."""
    tensors, record, passes = inputs(16, torch.float64), SequenceRecord(16), []

    class Forwards(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            passes.append(func is RING_FORWARD)
            return func(*args, **(kwargs or {}))

    def region(*q, **kwargs):
        regions.append(1)
        return attend(q[0] * 1.5, *q[1:], **kwargs) * 2

    def call(*args, **kwargs):
        return checkpoint(region, *args, use_reentrant=False, context_fn=selective, **kwargs)

    regions, before = [], rings_run()
    with Forwards():
        kept = differentiated(tensors, record, call=call)
    assert len(regions) == 2 and sum(passes) == rings_run() - before == 1, "the region ran twice, the ring once"
    query, *rest = tensors
    out, dquery, *others = oracle(query * 1.5, rest[0], rest[1], 2 * rest[2])
    check(kept, (2 * out, 1.5 * dquery, *others), FLOAT64)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 8), (1, 4, 8), (1, 4, 8)), "batch, heads, tokens, width"),
        (((1, 3, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4)), "2 key/value heads do not divide 3 query heads"),
        (((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 6)), "one shape"),
        (((1, 2, 1, 4), (1, 2, 8, 4), (1, 2, 8, 4)), "no cache, no cross-attention"),
    ],
)
def test_refusals(shapes, message):
    with pytest.raises(ValueError, match=message):
        attend(*(torch.zeros(shape) for shape in shapes))


def test_refuses_tokens_that_do_not_match_the_record_and_mixed_dtypes():
    record = SequenceRecord(32, "zigzag", num_ranks=4, inner_ring=2, rank=1, ring="nowhere")
    tensors = [torch.zeros(1, 2, 4, 4) for _ in range(3)]
    with pytest.raises(ValueError, match="holds 8 of the sequence's 32 tokens"):
        attend(*tensors, sequence=record)
    with pytest.raises(ValueError, match="one dtype"):
        attend(tensors[0], tensors[1].double(), tensors[2])


def test_refuses_masks_and_sinks_that_it_cannot_honour():
    tensors = [torch.zeros(1, 2, 8, 4) for _ in range(3)]
    with pytest.raises(ValueError, match="causal=False over rows that are padded"):
        attend(*tensors, sequence=SequenceRecord(8, padded=True), causal=False)
    with pytest.raises(ValueError, match="window=3.*needs causal=True"):
        attend(*tensors, causal=False, window=3)
    with pytest.raises(ValueError, match="each of the 2 query heads"):
        attend(*tensors, sinks=torch.zeros(4))
    with pytest.raises(ValueError, match="documents of 2 rows, but the batch has 1 here"):
        attend(*tensors, sequence=SequenceRecord(8, documents=(0, 3, 8, 16), num_rows=2))
    with pytest.raises(ValueError, match="head=4 does not fit 2 query heads"):
        attend(*tensors, sequence=SequenceRecord(32, head=4, ring="ring0"))


def test_a_ring_that_is_not_open_is_named():
    record = SequenceRecord(16, "zigzag", num_ranks=4, inner_ring=2, rank=1, ring="ring9")
    with pytest.raises(ValueError, match="'ring9', which is not open"):
        attend(*(torch.zeros(1, 2, 4, 4) for _ in range(3)), sequence=record)


def test_autocast_narrows():
    query, key, value = leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(query, key, value)
    assert out.dtype == torch.bfloat16
    assert_close_relative(out, attend(query, key, value), rtol=1e-2)


def strided(kind, *shape):
    """[B, H, T, D] whose last dim is not dense in memory."""
    batch, heads, tokens, width = shape
    if kind == "channels first":
        return torch.randn(batch, heads, width, tokens, dtype=torch.float64).transpose(-1, -2)
    if kind == "every second":
        return torch.randn(batch, heads, tokens, 2 * width, dtype=torch.float64)[..., ::2]
    return torch.randn(batch, heads, tokens, 1, dtype=torch.float64).expand(shape)


@pytest.mark.parametrize("kind", ["channels first", "every second", "expanded"])
def test_any_strides(kind):
    """The CPU kernel itself takes a dense last dim for granted and reads other memory."""
    torch.manual_seed(0)
    inputs = [strided(kind, 1, 2, 300, 16).requires_grad_() for _ in range(3)]
    found, expected = attend(*inputs), attention_oracle(*inputs)[0]
    grad = strided("channels first", 1, 2, 300, 16)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(*(torch.autograd.grad(out, inputs, grad) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
