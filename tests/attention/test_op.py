"""The public entry and its custom ops on one rank: PyTorch's own numbers, opcheck, compile, and clear refusals."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lightning_longctx.attention import attend
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.testing.tolerances import assert_close_relative
from tests.attention.test_loopback_parity import inputs


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


def test_gradcheck():
    assert torch.autograd.gradcheck(attend, leaves(6, torch.float64, heads=2, kv_heads=1, width=3))


def test_opcheck():
    record = SequenceRecord(16)
    result = torch.library.opcheck(
        torch.ops.longctx.ring_attention.default, (*leaves(), record.encode(), "", "auto", 0.3)
    )
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles(compiler):
    query, key, value = leaves()
    expected = attend(query, key, value)
    torch.compiler.reset()
    actual = torch.compile(lambda *qkv: attend(*qkv) * 1.0, backend=compiler)(query, key, value)
    torch.testing.assert_close(actual, expected)
    for tensor in torch.autograd.grad(actual.sum(), (query, key, value)):
        assert tensor.isfinite().all()


def test_selective_checkpointing_keeps_the_output_and_never_repeats_the_ring():
    """The reason for one op: a policy can name it, and recomputation takes its saved result."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    from lightning_longctx.attention.attend import calls_made

    executed = []
    ring_forward = torch.ops.longctx.ring_attention.default

    def policy(ctx, op, *args, **kwargs):
        if op is ring_forward:
            executed.append(ctx.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    query, key, value = leaves()
    before = calls_made()
    context = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    kept = checkpoint(lambda *qkv: attend(*qkv) * 2, query, key, value, use_reentrant=False, context_fn=context)
    grads = torch.autograd.grad(kept.sum(), (query, key, value))
    plain = torch.autograd.grad((attend(query, key, value) * 2).sum(), (query, key, value))
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
    assert calls_made() >= before + 2 and executed[0] is False


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
