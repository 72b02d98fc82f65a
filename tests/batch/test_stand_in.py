import torch

from lightning_longctx.batch import Sharding, ensure_sharded, shard_batch
from lightning_longctx.batch.stand_in import is_labelled, without_labels


def test_a_stand_in_keeps_everything_but_labels() -> None:
    tokens = torch.arange(8)[None]
    sharding = Sharding("zigzag", 2, 2, 1)
    batch = shard_batch({"weights": torch.ones(3), "input_ids": tokens, "labels": tokens}, sharding)
    stand_in = without_labels(batch)
    assert stand_in["shift_labels"].tolist() == [[-100] * 4]
    assert stand_in["sequence"].num_valid_tokens == 0
    assert stand_in["input_ids"] is batch["input_ids"] and stand_in["weights"] is batch["weights"]
    assert batch["sequence"].num_valid_tokens == 7 and (batch["shift_labels"] != -100).any()
    assert ensure_sharded(stand_in, sharding) is stand_in


def test_what_has_no_labels_cannot_be_one() -> None:
    tokens = torch.arange(8)[None]
    assert is_labelled(shard_batch({"input_ids": tokens, "labels": tokens}, Sharding()))
    assert not is_labelled(shard_batch({"input_ids": tokens}, Sharding()))
    assert not is_labelled([tokens])


def test_tokens_come_first() -> None:
    tokens = torch.arange(8)[None]
    assert list(shard_batch({"offsets": torch.arange(3), "input_ids": tokens}, Sharding()))[0] == "input_ids"
    assert list(shard_batch({"offsets": torch.arange(3), "inputs_embeds": tokens[..., None]}, Sharding()))[0] == (
        "inputs_embeds"
    )
