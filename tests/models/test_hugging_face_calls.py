"""What a call of a model of transformers, or one of its layers, may ask for over a shard; the rest is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_longctx.models.hugging_face.attention import shard_attention
from lightning_longctx.models.hugging_face.masks import Sequences, ShardMask, shard_mask
from lightning_longctx.models.hugging_face.whole import whole_models
from tests.models.hf_models import PACKED, SPREAD, tiny, tokens


@pytest.fixture(scope="module")
def model():
    return tiny()


def here(**more):
    """A call about the 4 tokens that this rank holds of 8."""
    return {key: value[:, :4] for key, value in tokens(8).items()} | more


LABELS = torch.ones(1, 4, dtype=torch.int64)
CALLS = {
    "position_ids": (dict(position_ids=None), r"no position_ids .*Pass position_ids=batch\['position_ids'\]"),
    "use_cache": (dict(use_cache=True), r"use_cache=True.*no key/value cache.*generate\(\) needs one.*save_to"),
    "past_key_values": (dict(past_key_values=()), r"no key/value cache.*generate\(\) needs one"),
    "output_attentions": (dict(output_attentions=True), "output_attentions=True"),
    "logits_to_keep": (dict(logits_to_keep=1), "the last tokens of each shard"),
    "labels": (dict(labels=LABELS), "would shift them within this rank's shard. Pass both"),
    "num_items": (dict(labels=LABELS, shift_labels=LABELS, num_items_in_batch=3), "weighs the mean of each rank"),
    "balance": (dict(labels=LABELS, shift_labels=LABELS, output_router_logits=True), "balance loss of this rank's"),
    "attention_mask": (dict(attention_mask=torch.ones(1, 4)), "attention_mask, which covers this rank's tokens only"),
    "dense mask": (dict(attention_mask=torch.zeros(1, 1, 4, 4)), "an attention_mask of four dims"),
    "cu_seq_lens": (dict(cu_seq_lens_q=torch.tensor([0, 2, 4])), "passes cu_seq_lens_q to attention"),
    "is_causal": (dict(is_causal=False), "other rules than causal.*bidirectional_mask_function"),
    "another length": (dict(input_ids=torch.ones(1, 5, dtype=torch.int64)), r"got 5 tokens a row, .* have \[4\]"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_are_refused(model, case):
    said, message = CALLS[case]
    with whole_models(model, [SPREAD]), pytest.raises(ValueError, match=message):
        model(**here(**said))


def test_arguments_without_names_are_checked_too(model):
    with whole_models(model, [SPREAD]), pytest.raises(ValueError, match="no position_ids"):
        model(here()["input_ids"], None)


def test_two_sequences_of_one_length_must_be_told_apart(model):
    other = PACKED.__class__(length=8, documents=(0, 1, 8))
    batch = tokens(8)
    with whole_models(model, [PACKED, other]):
        with pytest.raises(ValueError, match=r"more than one of them fits.*sequence=batch\['sequence'\]"):
            model(**batch)
        assert not torch.equal(model(**batch, sequence=PACKED).logits, model(**batch, sequence=other).logits)


def test_the_loss_of_shifted_labels_is_the_mean_over_them(model):
    batch, labels = tokens(8), torch.tensor([[1, -100, 3, 4, -100, 6, 7, -100]])
    with whole_models(model, [PACKED]):
        out = model(**batch, labels=labels, shift_labels=labels)
    expected = nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(out.loss, expected)


def test_parts_without_tokens_are_left_alone_and_refused_in_attention(model):
    """As a vision tower: its layers may not look up a mask."""
    with whole_models(model, [SPREAD]), pytest.raises(ValueError, match="was called by itself"):
        shard_mask(1, 4, 4, mask_function=None)


def rules():
    from transformers import masking_utils as hf

    block = torch.zeros(1, 8, dtype=torch.int64)
    both = hf.and_masks(hf.sliding_window_overlay(3), hf.causal_mask_function)
    packed = hf.packed_sequence_mask_function(block)
    return {
        "causal": (hf.causal_mask_function, None, None),
        "window": (both, 3, 3),
        "packed": (hf.and_masks(hf.remap_positions_for_packed_sequence(both, block), packed), 3, 3),
        "blocks": (hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(block)), None, "or_mask"),
        "chunks": (hf.chunked_causal_mask_function(4, block[:, 0]), 4, "chunked_overlay"),
        "both ways": (hf.bidirectional_mask_function, None, "bidirectional_mask_function"),
        "window both ways": (hf.sliding_window_bidirectional_mask_function(3), 3, "bidirectional"),
        "padding": (hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(block)), None, "padding_mask"),
        "a user's": (hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: q > k), None, "test_hugging_face_calls"),
    }


@pytest.mark.parametrize("name", list(rules()))
def test_rules_of_masks(name):
    function, local_size, expected = rules()[name]
    with Sequences((SPREAD,), SPREAD):
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=f"other rules than causal, window and packed.*{expected}"):
                shard_mask(1, 4, 4, mask_function=function, local_size=local_size)
        else:
            mask = shard_mask(1, 4, 4, mask_function=function, local_size=local_size, dtype=torch.float32)
            assert mask == ShardMask(expected, SPREAD)


def test_a_mask_is_cut_to_all_of_it_only():
    mask = ShardMask(3, SPREAD)
    assert mask[:, :, slice(0, None), :] is mask[:] is mask[..., ::1] is mask
    for index in (
        0,
        slice(-1, None),
        (slice(None), None),
        (slice(None), slice(0, 2)),
        torch.tensor([0]),
        slice(0, None, 2),
    ):
        with pytest.raises(ValueError, match="a part of its mask.*there is only the whole"):
            mask[index]


def test_masks_of_a_cache_are_refused():
    function = rules()["causal"][0]
    with Sequences((SPREAD,), SPREAD), pytest.raises(ValueError, match="1 queries at 3 and 4 keys at 0: caches"):
        shard_mask(1, 1, 4, q_offset=3, mask_function=function)


def attention(mask=ShardMask(None, PACKED), module=None, **more):  # noqa: B008  frozen
    heads = torch.randn(1, 4, 8, 4, generator=torch.Generator().manual_seed(0))
    return shard_attention(module or nn.Identity(), heads, heads, heads, mask, **more)


def test_a_layer_gets_its_output_by_token():
    found, weights = attention(scaling=0.5)
    assert found.shape == (1, 8, 4, 4) and found.is_contiguous() and weights is None
    assert not torch.equal(attention(scaling=1.0)[0], found)
    assert not torch.equal(attention(scaling=0.5, softcap=0.1)[0], found)
    assert not torch.equal(attention(scaling=0.5, s_aux=torch.zeros(4))[0], found)
    windowed = attention(ShardMask(2, PACKED), scaling=0.5)[0]
    assert not torch.equal(windowed, found)
    assert torch.equal(attention(ShardMask(2, PACKED), scaling=0.5, sliding_window=2)[0], windowed)


def test_layers_that_ask_for_more_are_refused():
    encoder = nn.Identity()
    encoder.is_causal = False  # type: ignore[assignment]
    wrong = [
        (dict(mask=None), "got no mask that was not made"),
        (dict(mask=torch.zeros(1, 1, 8, 8)), "a mask of type Tensor"),
        (dict(sliding_window=3), "sliding_window=3, but its mask has None"),
        (dict(mask=ShardMask(4, PACKED), sliding_window=3), "sliding_window=3, but its mask has 4"),
        (dict(is_causal=False), "is_causal=False"),
        (dict(module=encoder), "is_causal=False"),
        (dict(position_bias=torch.zeros(1, 4, 8, 8)), "passes position_bias to attention"),
        (dict(head_mask=torch.ones(4), output_attentions=True), "passes head_mask, output_attentions to attention"),
        (dict(sequence=SPREAD), "another sequence record than its model"),
    ]
    for said, message in wrong:
        with pytest.raises(ValueError, match=message):
            attention(**said)
    attention(sequence=PACKED, position_ids=torch.zeros(1, 8), use_cache=False, output_attentions=None)


def test_recomputed_layers_see_what_they_saw(model):
    from lightning_longctx.models.hugging_face.files import checkpoint_layers

    batch = tokens(8)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])

    def gradients(twin) -> list[Tensor]:
        with whole_models(twin, [PACKED]):
            loss = twin(**batch, labels=batch["input_ids"], shift_labels=batch["input_ids"]).loss
        with whole_models(twin, [PACKED]):
            loss.backward()
        return [weight.grad for weight in twin.parameters()]

    kept, again = tiny().train(), tiny().train()
    checkpoint_layers(again)
    for one, other in zip(gradients(kept), gradients(again), strict=True):
        assert torch.equal(one, other)
