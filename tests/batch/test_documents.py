"""Batches of packed documents: labels and positions of every document, whatever the layout and the rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.batch import Sharding, ensure_sharded, shard_batch
from lightning_longctx.batch.sharding import LayoutOption
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence import LAYOUTS
from lightning_longctx.sequence.documents import document_positions

Ends = list[tuple[int, ...]]


@st.composite
def packed_rows(draw: st.DrawFn) -> Ends:
    """Cumulative document lengths of each row."""
    length, num_rows = draw(st.integers(1, 24)), draw(st.integers(1, 3))
    row = st.sets(st.integers(1, length - 1), max_size=8) if length > 1 else st.just(set())
    rows = [(0, *sorted(draw(row)), length) for _ in range(num_rows)]
    return [rows[0]] * num_rows if draw(st.booleans()) else rows


def packed(rows: Ends) -> dict[str, Any]:
    """A full batch, every token its own number."""
    length = rows[0][-1]
    lengths = [[stop - start for start, stop in pairwise(ends)] for ends in rows]
    ids = torch.arange(1, len(rows) * length + 1).view(len(rows), length)
    positions = torch.stack([torch.from_numpy(document_positions(each)) for each in lengths])
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "weight": torch.rand(len(rows), length)}


def labels_of_documents(rows: Ends) -> list[list[int]]:
    """What every token predicts where each document stands alone."""
    length = rows[0][-1]
    return [
        [-100 if place + 1 in ends else row * length + place + 2 for place in range(length)]
        for row, ends in enumerate(rows)
    ]


def every_rank(batch: Any, sharding: Sharding) -> list[Any]:
    ranks = [(rank, head_rank) for rank in range(sharding.num_ranks) for head_rank in range(sharding.head)]
    return [shard_batch(batch, replace(sharding, rank=rank, head_rank=head_rank)) for rank, head_rank in ranks]


def gathered(shards: list[Any], key: str) -> torch.Tensor:
    """The whole entry [B, S], every row put together by its own positions."""
    num_rows, length = shards[0][key].shape[0], shards[0]["sequence"].length
    whole = torch.full((num_rows, length), -7, dtype=shards[0][key].dtype)
    for shard in shards:
        rows = shard["sequence"].row_ranges
        for row in range(num_rows):
            places = [place for piece in rows[row if len(rows) > 1 else 0] for place in piece]
            assert (whole[row, places] == -7).all()
            whole[row, places] = shard[key][row]
    return whole


@given(rows=packed_rows(), layout=st.sampled_from(LAYOUTS), num_ranks=st.integers(1, 5), head=st.integers(1, 2))
def test_shards_of_documents_join_to_the_whole(rows: Ends, layout: Any, num_ranks: int, head: int) -> None:
    batch, length = packed(rows), rows[0][-1]
    multiple = num_ranks * head if head > 1 else 1
    shards = every_rank(batch, Sharding(layout, num_ranks, multiple=multiple, head=head))
    records = [shard["sequence"] for shard in shards]
    for key in ("input_ids", "position_ids", "weight"):
        assert torch.equal(gathered(shards, key)[:, :length], batch[key]), key
    assert gathered(shards, "shift_labels")[:, :length].tolist() == labels_of_documents(rows)
    counted = length * len(rows) - sum(len(ends) - 1 for ends in rows)
    assert {record.num_valid_tokens for record in records} == {counted}
    assert sum(int((shard["shift_labels"] != -100).sum()) for shard in shards) == counted
    assert {record.padded for record in records} == {length % multiple > 0}
    assert len({(record.documents, record.num_rows, record.checksum) for record in records}) == 1
    for shard, record in zip(shards, records, strict=True):
        assert shard["input_ids"].shape == (len(rows), record.num_local_tokens)
        assert (
            ensure_sharded(
                shard,
                replace(
                    Sharding(layout, num_ranks, multiple=multiple, head=head),
                    rank=record.rank,
                    head_rank=record.head_rank,
                ),
            )
            is shard
        )


@given(rows=packed_rows())
def test_the_record_says_where_documents_are(rows: Ends) -> None:
    record = shard_batch(packed(rows), Sharding())["sequence"]
    length = rows[0][-1]
    if len(set(rows)) == 1:
        assert record.num_rows == 1 and record.documents == (rows[0] if len(rows[0]) > 2 else ())
    else:
        assert record.num_rows == len(rows)
        assert record.documents == (0, *(row * length + end for row, ends in enumerate(rows) for end in ends[1:]))


def test_padding_belongs_to_the_last_document_of_its_row() -> None:
    batch = packed([(0, 2, 5), (0, 4, 5)]) | {"attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])}
    batch["position_ids"][:, -1] = 0
    shard = shard_batch(batch, Sharding(multiple=4))
    assert shard["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert shard["shift_labels"].tolist() == [[2, -100, 4, *[-100] * 5], [7, 8, *[-100] * 6]]
    record = shard["sequence"]
    assert (record.documents, record.num_rows, record.padded) == ((0, 2, 8, 16), 2, True)


def test_shifted_labels_are_the_users_own() -> None:
    batch = packed([(0, 2, 4)])
    batch["shift_labels"] = batch.pop("labels")
    assert shard_batch(batch, Sharding())["shift_labels"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("positions", [None, torch.zeros(3, 2, 4, dtype=torch.int64)])
def test_batches_without_rows_of_positions_declare_nothing(positions: torch.Tensor | None) -> None:
    batch = packed([(0, 2, 4), (0, 1, 4)]) | {"position_ids": positions}
    shard = shard_batch(batch, Sharding())
    assert (shard["sequence"].documents, shard["sequence"].num_rows) == ((), 1)
    assert shard["shift_labels"].tolist() == [[2, 3, 4, -100], [6, 7, 8, -100]]


def test_entries_without_rows_cannot_follow_unlike_rows() -> None:
    batch = packed([(0, 2, 6), (0, 5, 6)]) | {"bias": torch.arange(6)}
    with pytest.raises(ValueError, match=r"'bias' of shape \(6,\) has no dim of 2 rows.*use layout=zigzag"):
        shard_batch(batch, Sharding("document_zigzag", 2, sequence_dims=(("bias", 0),)))
    shards = every_rank(batch, Sharding("zigzag", 2, sequence_dims=(("bias", 0),)))
    assert sorted(torch.cat([shard["bias"] for shard in shards]).tolist()) == list(range(6))


def test_entries_with_dims_before_the_rows_are_cut_row_by_row() -> None:
    batch = packed([(0, 2, 6), (0, 5, 6)])
    batch["grid"] = torch.stack([batch["input_ids"], -batch["input_ids"]])
    for shard in every_rank(batch, Sharding("document_zigzag", 2, sequence_dims=(("grid", 2),))):
        assert torch.equal(shard["grid"], torch.stack([shard["input_ids"], -shard["input_ids"]]))


def test_positions_go_with_their_tokens() -> None:
    with pytest.raises(ValueError, match=r"sequence_dims: \{position_ids: None\} cannot be honoured"):
        shard_batch(packed([(0, 4)]), Sharding(sequence_dims=(("position_ids", None),)))


def test_checksum_tells_documents_apart() -> None:
    one, other = (shard_batch(packed([ends]), Sharding())["sequence"].checksum for ends in ((0, 2, 6), (0, 3, 6)))
    assert one != other


def test_head_ranks_cut_a_context_rank_s_shard() -> None:
    batch = packed([(0, 16)])
    shards = every_rank(batch, Sharding("zigzag", 2, multiple=8, head=2))
    assert [shard["position_ids"][0].tolist() for shard in shards] == [
        [0, 1, 2, 3],
        [12, 13, 14, 15],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    with pytest.raises(ValueError, match="head_rank=2 is not one of the 2 head ranks"):
        Sharding(head=2, head_rank=2)


MASKS: dict[str, tuple[Mask, ...]] = {"causal": (Mask(),), "alternating": (Mask(window=4), Mask())}


@pytest.mark.parametrize("masks", list(MASKS))
@pytest.mark.parametrize("rows", [[(0, 64)], [(0, 8, 16, 24, 32, 40, 48, 56, 64)], [(0, 3, 64), (0, 60, 64)]])
def test_auto_is_one_layout_for_all_ranks(rows: Ends, masks: str) -> None:
    layout: LayoutOption = "auto"
    shards = every_rank(packed(rows), Sharding(layout, 4, 2, masks=MASKS[masks]))
    chosen = {shard["sequence"].layout for shard in shards}
    assert len(chosen) == 1 and chosen <= set(LAYOUTS)
    assert gathered(shards, "shift_labels").tolist() == labels_of_documents(rows)
    assert ensure_sharded(shards[3], Sharding(layout, 4, 2, 3, masks=MASKS[masks])) is shards[3]
    assert shard_batch(packed(rows), Sharding(layout))["sequence"].layout == "contiguous"
