"""Positions, cut and outputs belong together: every rank knows where its tokens are, and puts its logits there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees
from tests.cases.tiny import (
    SGD,
    TINY,
    assert_equal_numbers,
    make_trainer,
    samples,
    tiny_decoder,
)


class Logits(CausalLM):
    def predict_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        record = batch["sequence"]
        held = torch.tensor([position for piece in record.ranges for position in piece], dtype=torch.int64)
        return {"logits": self(batch), "positions": batch["position_ids"], "held": held}


def predicted(degrees: Degrees, layout: str, lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """What this rank predicts for a batch of two sequences of every length."""
    torch.manual_seed(0)
    module = Logits(TINY, optimizer=SGD)
    batches = [batch_of(length) for length in lengths]
    return make_trainer(degrees, layout).predict(module, DataLoader(batches, batch_size=None))  # type: ignore


def batch_of(length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([sample["input_ids"] for sample in samples(2, length, seed=length)])}


LENGTHS = (16, 13, 3)
ZIGZAG = {
    2: [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]],
    4: [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
}


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize(
    ("num_ranks", "degrees"),
    [
        (2, Degrees(context=2)),
        (4, Degrees(context=4)),
        (4, Degrees(context=4, inner_ring=2)),
        (4, Degrees(context=4, inner_ring=1)),
    ],
)
def test_gathered_logits_are_those_of_one_process(gloo: Any, num_ranks: int, degrees: Degrees, layout: str) -> None:
    """B26: RoPE sees global positions, and these say where every logit belongs, also where shards are uneven."""
    by_rank = gloo(num_ranks).run(predicted, degrees, layout, LENGTHS)
    decoder = tiny_decoder()
    for index, length in enumerate(LENGTHS):
        shards = [rank[index] for rank in by_rank]
        for shard in shards:
            assert (shard["positions"] == shard["held"]).all() and len(shard["positions"]) == 2
        if layout == "zigzag" and length == 16:
            assert [shard["held"].tolist() for shard in shards] == ZIGZAG[num_ranks]
        positions = torch.cat([shard["held"] for shard in shards])
        assert positions.sort().values.tolist() == list(range(length))
        logits = torch.cat([shard["logits"] for shard in shards], dim=1)[:, positions.argsort()]
        with torch.no_grad():
            expected = decoder(batch_of(length)["input_ids"])
        assert_equal_numbers({"logits": logits}, {"logits": expected})


def test_a_model_that_knows_its_positions_only_locally_is_noticed() -> None:
    """B26: the check above would fail if a rank counted its positions from 0."""
    tokens, decoder = batch_of(16)["input_ids"], tiny_decoder()
    wrong = torch.arange(16).roll(4).expand(2, 16)
    with torch.no_grad(), pytest.raises(AssertionError, match="logits differs"):
        assert_equal_numbers({"logits": decoder(tokens, wrong)}, {"logits": decoder(tokens)})
