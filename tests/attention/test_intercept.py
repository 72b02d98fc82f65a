"""Plain attention calls over a shard: honoured or refused, never silently local."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F  # noqa: N812
from torch.nn.functional import scaled_dot_product_attention as imported_long_before

from lightning_longctx.attention import intercept
from lightning_longctx.attention.intercept import intercepted
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.record import SequenceRecord

SHARD = SequenceRecord(32, "zigzag", num_ranks=4, inner_ring=2, rank=1, ring="ring0")


@pytest.fixture
def seen(monkeypatch):
    """Sequences that attention was called with, instead of calling it."""
    calls = []

    def attend_masked(query, key, value, options, *, sequence):
        assert options.mask == Mask(causal=True, isolate=False), "a plain call knows nothing of documents"
        assert options.softcap is None
        calls.append((sequence, options.scale, options.dropout_p))
        return query

    monkeypatch.setattr(intercept, "attend_masked", attend_masked)
    return calls


def qkv(tokens=8, heads=2):
    return torch.zeros(1, heads, tokens, 4), torch.zeros(1, 2, tokens, 4), torch.zeros(1, 2, tokens, 4)


@pytest.mark.parametrize("attention", [F.scaled_dot_product_attention, imported_long_before])
def test_plain_calls_become_ring_attention_however_they_are_imported(seen, attention):
    with intercepted([SHARD]):
        attention(*qkv(), is_causal=True, scale=0.5, dropout_p=0.1)
    assert seen == [(SHARD, 0.5, 0.1)]
    attention(*qkv(), is_causal=True)
    assert len(seen) == 1, "outside the step nothing is changed"


def test_one_rank_changes_nothing(seen):
    with intercepted([SequenceRecord(8)]):
        F.scaled_dot_product_attention(*qkv(), attn_mask=torch.zeros(8, 8))
    assert not seen


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(attn_mask=torch.zeros(8, 8)), "attn_mask.*is_causal=True and no mask"),
        (dict(is_causal=False), "is_causal=False"),
    ],
)
def test_refusals_say_what_to_do(seen, kwargs, message):
    with intercepted([SHARD]), pytest.raises(ValueError, match=message):
        F.scaled_dot_product_attention(*qkv(), **kwargs)
    assert not seen


def test_grouped_heads_need_pytorchs_own_flag(seen):
    with intercepted([SHARD]):
        with pytest.raises(ValueError, match="enable_gqa=True"):
            F.scaled_dot_product_attention(*qkv(heads=4), is_causal=True)
        F.scaled_dot_product_attention(*qkv(heads=4), is_causal=True, enable_gqa=True)
    assert len(seen) == 1


def test_the_sequence_is_found_by_its_local_length(seen):
    other = SequenceRecord(64, "zigzag", num_ranks=4, inner_ring=2, rank=1, ring="ring0")
    twin = SequenceRecord(33, "zigzag", num_ranks=4, inner_ring=2, rank=1, ring="ring0")
    with intercepted([SHARD, other, SHARD]):
        F.scaled_dot_product_attention(*qkv(16), is_causal=True)
        with pytest.raises(ValueError, match=r"attention over 9 tokens.*\[8, 16\].*none fits"):
            F.scaled_dot_product_attention(*qkv(9), is_causal=True)
    with intercepted([SHARD, twin]), pytest.raises(ValueError, match="more than one of them fits"):
        F.scaled_dot_product_attention(*qkv(8), is_causal=True)
    assert seen == [(other, None, 0.0)]


def test_sequences_with_other_documents_are_not_confused(seen):
    """Both have 8 tokens here, but a call does not say which of the two is meant."""
    packed = SequenceRecord(32, "zigzag", 4, 2, 1, documents=(0, 20, 32), ring="ring0")
    with intercepted([packed, SHARD]), pytest.raises(ValueError, match="more than one of them fits"):
        F.scaled_dot_product_attention(*qkv(), is_causal=True)
    with intercepted([packed, packed]):
        F.scaled_dot_product_attention(*qkv(), is_causal=True)
    assert seen == [(packed, None, 0.0)]


def test_head_ranks_alone_are_a_spread_sequence(seen):
    shard = SequenceRecord(32, head=4, head_rank=1, ring="ring0")
    with intercepted([shard]):
        F.scaled_dot_product_attention(*qkv(), is_causal=True)
    assert seen == [(shard, None, 0.0)]


def test_multihead_attention_is_honoured_or_refused(seen):
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x, mask = torch.randn(1, 8, 8), torch.nn.Transformer.generate_square_subsequent_mask(8)
    with intercepted([SHARD]):
        with pytest.raises(ValueError, match="need_weights"):
            layer(x, x, x, attn_mask=mask, is_causal=True)
        layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        with pytest.raises(ValueError, match="is_causal"):
            layer(x, x, x, need_weights=False)
        layer.eval()
        with torch.no_grad(), pytest.raises(ValueError):  # the fused fast path of evaluation, or is_causal=False
            layer(x, x, x, need_weights=False)
    assert len(seen) == 1


def test_fused_encoder_layers_and_flex_attention_are_refused(seen):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, dim_feedforward=8).eval()
    with intercepted([SHARD]), torch.no_grad(), pytest.raises(ValueError, match="context=1"):
        layer(torch.randn(1, 8, 8))
    with intercepted([SHARD]), pytest.raises(ValueError, match="flex_attention"):
        flex.flex_attention(*qkv())
    assert not seen
