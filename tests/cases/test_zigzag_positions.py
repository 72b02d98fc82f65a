"""Positions, cut and outputs belong together: every rank knows where its tokens are, and puts its logits there."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, attend
from lightning_longctx.attention import close_ring, open_ring
from lightning_longctx.sequence import LAYOUTS, SequenceRecord
from lightning_longctx.testing import attention_oracle
from lightning_longctx.topology import CONTEXT, axis_rank
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


HYBRID = [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
"""By ring rank, then head rank: the zigzag shard of a ring rank, cut in its own order."""


@pytest.mark.parametrize("placement", ["head_first", "context_first"])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_gathered_logits_of_heads_and_a_ring(gloo: Any, layout: str, placement: Any) -> None:
    """B26: Ulysses 2 x ring 2: the ring meets zigzag data, not a contiguous part; outputs go back where they belong."""
    degrees = Degrees(context=2, head=2, placement=placement)
    shards = [rank[0] for rank in gloo(4).run(predicted, degrees, layout, (16,))]
    if layout == "zigzag":
        order = [0, 1, 2, 3] if placement == "head_first" else [0, 2, 1, 3]
        assert [shard["held"].tolist() for shard in shards] == [HYBRID[index] for index in order]
    assert all((shard["positions"] == shard["held"]).all() for shard in shards)
    positions = torch.cat([shard["held"] for shard in shards])
    logits = torch.cat([shard["logits"] for shard in shards], dim=1)[:, positions.argsort()]
    with torch.no_grad():
        expected = tiny_decoder()(batch_of(16)["input_ids"])
    assert_equal_numbers({"logits": logits}, {"logits": expected})


def turned(degrees: Degrees, layout: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Attention of this rank's tokens, queries and keys turned by their positions (RoPE), with its gradients."""
    rank = dist.get_rank()
    name = open_ring(degrees, rank, timedelta(seconds=60))
    place = axis_rank(degrees, rank, *CONTEXT), degrees.head, axis_rank(degrees, rank, "head")
    record = SequenceRecord(tensors[0].shape[2], layout, degrees.context, degrees.inner, *place, ring=name)
    held = torch.tensor([position for piece in record.ranges for position in piece])
    *leaves, grad = (tensor[:, :, held] for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = attend(turn(leaves[0], held), turn(leaves[1], held), leaves[2], sequence=record)
    grads = torch.autograd.grad(out, leaves, grad)
    close_ring(name)
    return held, out.detach(), *grads


def turn(tensor: Tensor, positions: Tensor) -> Tensor:
    angle = 0.3 * positions[:, None]
    first, second = tensor.chunk(2, dim=-1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "degrees",
    [Degrees(1, 2, head=2), Degrees(1, 2, 1, 2, placement="context_first"), Degrees(1, 4, 2), Degrees(1, 1, head=4)],
)
def test_turned_queries_meet_turned_keys(gloo: Any, degrees: Degrees, layout: str) -> None:
    """B26: straight through ``attend``: values and gradients of every token, in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 16, 6) for heads in (4, 2, 2, 4)]
    tensors = tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    results = gloo(4).run(turned, degrees, layout, tensors)
    order = torch.cat([held for held, *_ in results]).argsort()
    *leaves, grad = (tensor.clone() for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    everywhere = torch.arange(16)
    expected, _ = attention_oracle(turn(leaves[0], everywhere), turn(leaves[1], everywhere), leaves[2])
    for index, right in enumerate((expected, *torch.autograd.grad(expected, leaves, grad))):
        found = torch.cat([parts[index] for _, *parts in results], dim=2)[:, :, order]
        torch.testing.assert_close(found, right.detach(), rtol=0, atol=1e-10)


def test_a_model_that_knows_its_positions_only_locally_is_noticed() -> None:
    """B26: the check above would fail if a rank counted its positions from 0."""
    tokens, decoder = batch_of(16)["input_ids"], tiny_decoder()
    wrong = torch.arange(16).roll(4).expand(2, 16)
    with torch.no_grad(), pytest.raises(AssertionError, match="logits differs"):
        assert_equal_numbers({"logits": decoder(tokens, wrong)}, {"logits": decoder(tokens)})
