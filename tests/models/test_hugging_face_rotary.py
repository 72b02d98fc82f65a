"""Rotary positions of shards are those of whole sequences, also where they depend on the length or are narrowed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_longctx.batch import Sharding
from lightning_longctx.batch.shard import shard_batch
from lightning_longctx.models.hugging_face.masks import Sequences
from lightning_longctx.models.hugging_face.rotary import exact_frequencies, length_dependent, see_whole_length
from lightning_longctx.models.hugging_face.whole import whole_models
from tests.models.hf_models import tiny, tokens

FACTORS = {"short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}
KINDS = {
    "dynamic": dict(max_position_embeddings=16, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)),
    "longrope": dict(
        max_position_embeddings=64,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=1e4, factor=2.0, original_max_position_embeddings=32, **FACTORS
        ),
    ),
}


def rotary(kind, length=0):
    """The rotary module of a fresh model: frequencies of the dynamic type remember the longest sequence so far."""
    return tiny(**KINDS[kind]).model.rotary_emb


def shards(batch, num_ranks, **more):
    sharding = Sharding("zigzag", num_ranks=num_ranks, **more)
    return [shard_batch(dict(batch), replace(sharding, rank=rank)) for rank in range(num_ranks)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(48,), (20,), (48, 20, 40), (33, 7), (15, 48)])
def test_a_shard_turns_by_the_length_of_the_whole(kind, lengths):
    one, several = rotary(kind), [rotary(kind) for _ in range(4)]
    for length in lengths:
        batch = tokens(length, rows=2)
        if length == 40:
            batch["position_ids"] = torch.cat([torch.arange(28), torch.arange(12)]).expand(2, -1)
        whole = one(torch.zeros(1), batch["position_ids"])
        for part, shard in zip(several, shards(batch, 4, multiple=8), strict=True):
            record, positions = shard["sequence"], shard["position_ids"]
            sequences = Sequences((record,), record)
            handles = see_whole_length(part, sequences)
            found = part(torch.zeros(1), position_ids=positions)
            for handle in handles:
                handle.remove()
            at = torch.tensor([place for piece in record.ranges for place in piece])
            real = at < length
            for mine, its in zip(found, whole, strict=True):
                assert mine.shape == (2, len(at), 4)
                assert torch.equal(mine[:, real], its[:, at[real]])


def test_without_help_a_shard_would_turn_by_its_own_length():
    batch = tokens(48)
    shard = shards(batch, 4)[3]
    whole, alone = rotary("dynamic"), rotary("dynamic")
    at = [place for piece in shard["sequence"].ranges for place in piece]
    assert not torch.equal(
        whole(torch.zeros(1), batch["position_ids"])[0][:, at], alone(torch.zeros(1), shard["position_ids"])[0]
    )


def test_hidden_padding_does_not_count_for_any_degree():
    """One rank goes by the tokens too, as several would: 20 of 48."""
    batch = tokens(48)
    batch["attention_mask"] = (torch.arange(48) < 20).long()[None]
    (shard,) = shards(batch, 1)
    model, short = tiny(**KINDS["dynamic"]), tiny(**KINDS["dynamic"])
    with whole_models(model, [shard["sequence"]]):
        found = model(input_ids=shard["input_ids"], position_ids=shard["position_ids"]).logits[:, :20]
    expected = short(input_ids=batch["input_ids"][:, :20]).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_record_without_lengths_is_refused():
    record = replace(shards(tokens(16), 2)[0]["sequence"], row_lengths=())
    part = rotary("longrope")
    see_whole_length(part, Sequences((record,), record))
    with pytest.raises(ValueError, match="LlamaRotaryEmbedding scales .* record does not know it"):
        part(torch.zeros(1), torch.arange(8)[None])


def test_types_that_depend_on_the_length():
    assert [len(list(length_dependent(tiny(**more)))) for more in ({}, *KINDS.values())] == [0, 1, 1]
    assert list(length_dependent(tiny("gpt_oss", num_local_experts=2, num_experts_per_tok=1))) == []


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_conversion_to_a_narrow_dtype_keeps_frequencies(kind):
    holder = torch.nn.ModuleDict({"lm": tiny(kind)})
    before = {name: buffer.clone() for name, buffer in holder.named_buffers() if "inv_freq" in name}
    assert before and all(buffer.dtype == torch.float32 for buffer in before.values())
    converted = exact_frequencies(lambda module: module.to(torch.bfloat16))(holder)
    assert converted is holder
    assert {weight.dtype for weight in holder.parameters()} == {torch.bfloat16}
    after = dict(holder.named_buffers())
    for name, buffer in before.items():
        assert after[name].dtype == torch.float32 and torch.equal(after[name], buffer), name
    assert "inv_freq" not in " ".join(holder.state_dict())
