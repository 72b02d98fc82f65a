import pickle
from collections import OrderedDict, UserDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.batch import Sharding, shard_batch
from lightning_longctx.sequence import LAYOUTS, padding_multiple


def full_batch(rows: int = 2, length: int = 10) -> dict[str, Any]:
    ids = torch.arange(1, rows * length + 1).view(rows, length)
    return {"input_ids": ids, "labels": ids.clone()}


def every_rank(batch: Any, sharding: Sharding) -> list[Any]:
    return [shard_batch(batch, replace(sharding, rank=rank)) for rank in range(sharding.num_ranks)]


def joined(shards: list[Any], key: str, dim: int = 1) -> torch.Tensor:
    """The whole entry again, put together by the positions that the record names."""
    positions = torch.cat([torch.tensor([p for piece in s["sequence"].ranges for p in piece]).long() for s in shards])
    return torch.cat([shard[key] for shard in shards], dim=dim).index_select(dim, positions.argsort())


@given(
    layout=st.sampled_from(LAYOUTS),
    num_ranks=st.integers(1, 4),
    length=st.integers(1, 23),
    pad=st.booleans(),
    seed=st.integers(0, 99),
)
def test_shards_join_to_the_whole(layout: Any, num_ranks: int, length: int, pad: bool, seed: int) -> None:
    torch.manual_seed(seed)
    batch = full_batch(2, length) | {"weight": torch.rand(2, length, 31), "index": torch.arange(29)}
    batch["labels"][torch.rand(2, length) < 0.3] = -100
    multiple = padding_multiple(layout, num_ranks) if pad else 1
    shards = every_rank(batch, Sharding(layout, num_ranks, multiple=multiple))
    padded = shards[0]["sequence"].length
    tail = padded - length

    assert padded % multiple == 0 and 0 <= tail < multiple
    assert joined(shards, "input_ids").tolist() == [row.tolist() + [0] * tail for row in batch["input_ids"]]
    assert joined(shards, "position_ids").tolist() == [list(range(padded))] * 2
    shifted = [row.tolist()[1:] + [-100] * (1 + tail) for row in batch["labels"]]
    assert joined(shards, "shift_labels").tolist() == shifted
    torch.testing.assert_close(joined(shards, "weight")[:, :length], batch["weight"], rtol=0, atol=0)
    assert joined(shards, "weight")[:, length:].abs().sum() == 0
    valid = sum(label != -100 for row in shifted for label in row)
    assert [shard["sequence"].num_valid_tokens for shard in shards] == [valid] * num_ranks
    assert sum(int((shard["shift_labels"] != -100).sum()) for shard in shards) == valid
    for shard in shards:
        assert "labels" not in shard
        assert shard["index"].tolist() == list(range(29))
        assert all(shard[key].is_contiguous() for key in ("input_ids", "position_ids", "shift_labels", "weight"))
        assert shard["input_ids"].shape[1] == shard["sequence"].num_local_tokens


@pytest.mark.parametrize(
    ("length", "context", "tensor", "padded"), [(2999, 4, 1, 3000), (10, 2, 1, 12), (12, 2, 4, 16)]
)
def test_padded_length_under_zigzag_and_tensor_ranks(length: int, context: int, tensor: int, padded: int) -> None:
    multiple = padding_multiple("zigzag", context, 1, tensor)
    shards = every_rank(full_batch(1, length), Sharding("zigzag", context, multiple=multiple))
    assert [shard["sequence"].length for shard in shards] == [padded] * context
    assert {shard["input_ids"].shape[1] for shard in shards} == {padded // context}
    assert joined(shards, "shift_labels")[0, length - 1 :].tolist() == [-100] * (padded - length + 1)
    assert shards[0]["sequence"].num_valid_tokens == length - 1


def test_labels_cross_the_edges_of_shards() -> None:
    first, second = every_rank(full_batch(1, 8), Sharding("zigzag", 2))
    assert first["position_ids"].tolist() == [[0, 1, 6, 7]]
    assert first["shift_labels"].tolist() == [[2, 3, 8, -100]]
    assert second["position_ids"].tolist() == [[2, 3, 4, 5]]
    assert second["shift_labels"].tolist() == [[4, 5, 6, 7]]


def test_one_rank_gets_the_same_form() -> None:
    batch = shard_batch(full_batch(1, 3), Sharding())
    assert batch["shift_labels"].tolist() == [[2, 3, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2]]
    assert batch["sequence"] == Sharding().record(3, 2, batch["sequence"].checksum, row_lengths=(3,))


def test_the_batch_that_came_in_is_not_changed() -> None:
    batch = full_batch() | {"attention_mask": torch.ones(2, 10)}
    copy = {key: value.clone() for key, value in batch.items()}
    every_rank(batch, Sharding("striped", 2, multiple=4))
    assert batch.keys() == copy.keys()
    assert all(torch.equal(batch[key], copy[key]) for key in copy)


def test_shifted_labels_are_not_shifted_again() -> None:
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "shift_labels": torch.tensor([[2, 3, 4]], dtype=torch.int32)}
    shard = shard_batch(batch, Sharding(multiple=4))
    assert shard["shift_labels"].tolist() == [[2, 3, 4, -100]]
    assert shard["shift_labels"].dtype == torch.int64
    assert shard["sequence"].num_valid_tokens == 3


def test_without_labels_nothing_is_counted() -> None:
    for extra in ({}, {"labels": None}):
        shard = shard_batch({"input_ids": torch.ones(1, 4, dtype=torch.int64)} | extra, Sharding("contiguous", 2))
        assert "shift_labels" not in shard and "labels" not in shard
        assert shard["sequence"].num_valid_tokens == -1


def test_padding_that_the_mask_names_does_not_count() -> None:
    batch = full_batch(2, 4) | {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    shard = shard_batch(batch, Sharding())
    assert "attention_mask" not in shard
    assert shard["shift_labels"].tolist() == [[2, 3, 4, -100], [6, -100, -100, -100]]
    assert shard["sequence"].num_valid_tokens == 4


def test_mask_and_shifted_labels() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 0]]),
        "shift_labels": torch.tensor([[2, 3, 9, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
    }
    assert shard_batch(batch, Sharding())["shift_labels"].tolist() == [[2, 3, 9, -100]]


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 6), (3, 2, 6)])
def test_your_positions_are_kept_and_continued(shape: tuple[int, ...]) -> None:
    positions = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32).expand(shape)
    shards = every_rank(full_batch(2, 6) | {"position_ids": positions}, Sharding("zigzag", 2, multiple=4))
    whole = joined(shards, "position_ids", dim=-1)
    assert whole.dtype == torch.int64
    assert tuple(whole.shape) == ((3, 2, 8) if len(shape) == 3 else (2, 8))
    assert whole.flatten(0, -2).tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]] * (6 if len(shape) == 3 else 2)


def test_options_cut_and_pad_what_shapes_cannot_tell() -> None:
    batch = full_batch(2, 6) | {"bias": torch.ones(4, 6), "table": torch.arange(6), "flag": torch.ones(2, 6).bool()}
    sharding = Sharding(
        "contiguous",
        2,
        multiple=8,
        sequence_dims=(("bias", -1), ("table", None)),
        pad_values=(("bias", 5), ("flag", 1)),
    )
    shards = every_rank(batch, sharding)
    assert joined(shards, "bias", dim=1).tolist() == [[1.0] * 6 + [5.0] * 2] * 4
    assert joined(shards, "flag").all()
    assert [shard["table"].tolist() for shard in shards] == [list(range(6))] * 2
    with pytest.raises(ValueError, match="sequence_dims: {table: 0}"):
        shard_batch(batch, Sharding("contiguous", 2, sequence_dims=(("bias", 1),)))


def test_embeddings_instead_of_tokens() -> None:
    embeds = torch.rand(2, 4, 4, requires_grad=True)
    shards = every_rank({"inputs_embeds": embeds, "labels": torch.ones(2, 4).long()}, Sharding("striped", 2))
    torch.testing.assert_close(joined(shards, "inputs_embeds"), embeds, rtol=0, atol=0)
    shards[1]["inputs_embeds"].sum().backward()
    assert embeds.grad is not None
    assert embeds.grad[0, :, 0].tolist() == [0, 1, 0, 1]


def test_mappings_of_other_types() -> None:
    class Encoding(UserDict):
        extra = "kept"

    encoding = Encoding(full_batch())
    shard = shard_batch(encoding, Sharding("contiguous", 2))
    assert type(shard) is Encoding and shard.extra == "kept"
    assert "labels" in encoding and "sequence" in shard and "labels" not in shard
    assert type(shard_batch(OrderedDict(full_batch()), Sharding())) is dict


@pytest.mark.parametrize("sharding", [Sharding(), Sharding("contiguous", 2)])
@pytest.mark.parametrize("batch", [(torch.ones(1, 4), torch.ones(1, 4)), [torch.ones(1, 4)], torch.ones(1, 4), "text"])
def test_batches_that_are_no_mapping(batch: Any, sharding: Sharding) -> None:
    with pytest.raises(ValueError, match="Return a dict from collate_fn.*input_ids.*labels"):
        shard_batch(batch, sharding)


def test_a_batch_is_cut_once() -> None:
    shard = shard_batch(full_batch(), Sharding("contiguous", 2))
    with pytest.raises(ValueError, match="cut before"):
        shard_batch(shard, Sharding("contiguous", 2))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"shift_labels": torch.ones(2, 10)}, "both labels and shift_labels"),
        ({"labels": torch.ones(2)}, r"labels of shape \(2,\) must have one label for each token"),
        ({"labels": [[1] * 10] * 2}, r"\['labels'\] must be tensors"),
        ({"input_ids": torch.ones(10)}, r"input_ids of shape \(10,\) must be \[B, S\]"),
        ({"attention_mask": torch.ones(2, 1, 10, 10)}, "attention_mask of shape"),
        ({"position_ids": torch.ones(2, 9)}, "position_ids"),
    ],
)
def test_entries_that_cannot_be_cut(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch(full_batch() | extra, Sharding("contiguous", 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "spiral"}, "layout='spiral'"),
        ({"rank": 2, "num_ranks": 2}, "rank=2"),
        ({"multiple": 0}, "multiple=0"),
        ({"sequence_dims": (("labels", 1),)}, r"sequence_dims cannot be set for \['labels'\]"),
        ({"pad_values": (("position_ids", 1),)}, r"pad_values cannot be set for \['position_ids'\]"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sharding(**options)


def test_a_sharding_travels() -> None:
    sharding = Sharding("zigzag", 4, 2, 3, 8, "ring", "aten", (("bias", None),), (("flag", 1),))
    assert pickle.loads(pickle.dumps(sharding)) == sharding
    record = sharding.record(16, 5)
    assert (record.ring, record.backend, record.inner_ring, record.rank) == ("ring", "aten", 2, 3)


def test_what_would_be_lost_or_left_whole_in_silence_is_refused() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="labels of dtype torch.float32 are no token ids"):
        shard_batch({"input_ids": tokens, "labels": torch.tensor([[0.1, 0.7, 1.9, 2.5]])}, Sharding())
    for nested in ({"w": torch.ones(1, 4)}, [torch.ones(1, 4)]):
        with pytest.raises(ValueError, match="'aux' holds tensors with a dim of the sequence's length 4"):
            shard_batch({"input_ids": tokens, "aux": nested}, Sharding())
        kept = shard_batch({"input_ids": tokens, "aux": nested}, Sharding(sequence_dims=(("aux", None),)))
        assert kept["aux"] is nested
    with pytest.raises(ValueError, match=r"sequence_dims names \['input_idz'\]"):
        shard_batch({"input_ids": tokens}, Sharding(sequence_dims=(("input_idz", 1),)))


def test_checksum_tells_samples_and_their_order_apart() -> None:
    def checksum(*rows: list[int]) -> int:
        return shard_batch({"input_ids": torch.tensor(rows)}, Sharding())["sequence"].checksum

    sums = [checksum([1, 2], [3, 4]), checksum([3, 4], [1, 2]), checksum([1, 2], [3, 5]), checksum([2, 1], [3, 4])]
    assert len(set(sums)) == 4 and checksum([1, 2], [3, 4]) == sums[0]
    ranks = [Sharding("zigzag", 2, 2, rank) for rank in range(2)]
    batch = {"input_ids": torch.arange(8)[None]}
    assert len({shard_batch(batch, rank)["sequence"].checksum for rank in ranks}) == 1


def test_checksums_tell_batches_apart() -> None:
    """Sums of tokens times places would be equal for all but the first two."""
    ids = torch.full((1, 50), 9)
    swapped = ids.clone()
    ids[0, :3], swapped[0, :3] = torch.tensor([5, 5, 5]), torch.tensor([6, 3, 6])
    packed = [torch.cat([torch.arange(n) for n in lengths])[None] for lengths in ([10, 10, 10, 20], [11, 7, 13, 19])]
    batches = [{"input_ids": ids}, {"input_ids": swapped}, {"input_ids": torch.cat([ids, ids], 1)}]
    batches += [{"input_ids": ids, "position_ids": positions} for positions in packed]
    batches += [{"inputs_embeds": torch.zeros(1, length, 2)} for length in (40, 48)]
    checksums = [shard_batch(batch, Sharding())["sequence"].checksum for batch in batches]
    assert len(set(checksums)) == len(checksums)
    assert checksums[0] == shard_batch(batches[0], Sharding(num_ranks=2, rank=1))["sequence"].checksum
