"""B20: padding inside a pack is taken for a tail. No layout here pads documents, so there is none to lose tokens to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_longctx.batch import Sharding, shard_batch
from lightning_longctx.sequence import LAYOUTS

BATCH = {
    "input_ids": torch.tensor([[10, 11, 12, 20, 21]]),
    "labels": torch.tensor([[10, 11, 12, 20, 21]]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
}
NEXT = {10: 11, 11: 12, 12: -100, 20: 21, 21: -100}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_real_token_keeps_its_label(layout, multiple):
    """B20, on every layout, and with the tail padded as well."""
    shards = [shard_batch(BATCH, Sharding(layout, 2, rank=rank, multiple=multiple)) for rank in range(2)]
    tokens = torch.cat([shard["input_ids"] for shard in shards], dim=1)[0].tolist()
    labels = torch.cat([shard["shift_labels"] for shard in shards], dim=1)[0].tolist()
    assert sorted(token for token in tokens if token) == [10, 11, 12, 20, 21]
    assert all(label == NEXT.get(token, -100) for token, label in zip(tokens, labels, strict=True))
    assert [shard["sequence"].num_valid_tokens for shard in shards] == [3, 3]


def test_shards_of_a_layout_by_documents():
    """B20: ids 10, 11, 12 and 20, 21 over 2 ranks; what the case has as padding is not there."""
    sharding = Sharding("document_zigzag", 2)
    first, second = (shard_batch(BATCH, replace(sharding, rank=rank)) for rank in range(2))
    assert first["sequence"].length == 5
    assert first["input_ids"].tolist() == [[10, 12, 20]] and second["input_ids"].tolist() == [[11, 21]]
    assert first["position_ids"].tolist() == [[0, 2, 0]] and second["position_ids"].tolist() == [[1, 1]]
    assert first["shift_labels"].tolist() == [[11, -100, 21]] and second["shift_labels"].tolist() == [[12, -100]]
