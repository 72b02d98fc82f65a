"""Layouts partition the sequence evenly, in order; numbers of padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_longctx.sequence.layout import LAYOUTS, layout_ranges, padded_length, padding_multiple
from lightning_longctx.sequence.record import SequenceRecord


@given(st.sampled_from(LAYOUTS), st.integers(0, 100), st.integers(1, 17))
def test_shards_partition_the_sequence(layout, length, num_ranks):
    shards = layout_ranges(layout, length, num_ranks)
    held = [[position for piece in shard for position in piece] for shard in shards]
    assert sorted(position for shard in held for position in shard) == list(range(length))
    assert all(shard == sorted(shard) for shard in held), "local order is global order"
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert all(len(piece) for shard in shards for piece in shard)


def test_zigzag_pairs_early_and_late_chunks():
    held = lambda ranks: [[p for piece in shard for p in piece] for shard in layout_ranges("zigzag", 16, ranks)]  # noqa: E731
    assert held(2) == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert held(4) == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("length", "context", "tensor", "padded"), [(2999, 4, 1, 3000), (10, 2, 1, 12), (12, 2, 4, 16)]
)
def test_padding_uses_the_least_joint_factor(length, context, tensor, padded):
    assert padded_length(length, padding_multiple("zigzag", context, tensor=tensor)) == padded


def test_unknown_layout_names_the_choices():
    with pytest.raises(ValueError, match="zigzag"):
        layout_ranges("snake", 8, 2)  # type: ignore[arg-type]


def test_record_survives_the_trip_through_an_op():
    record = SequenceRecord(24, "zigzag", 4, 2, 3, num_valid_tokens=9, ring="ring0", backend="aten")
    copy = SequenceRecord.decode(record.encode(), record.ring, record.backend)
    assert (copy.shards, copy.ranges, copy.inner_ring) == (record.shards, record.ranges, 2)
    assert record.to("cpu", non_blocking=True) is record
