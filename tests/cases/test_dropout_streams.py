"""Which ranks, steps and recomputations draw the same random numbers, and which must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_longctx import Degrees, attend
from lightning_longctx.attention.dropout import StepDraws, drawing
from lightning_longctx.attention.token_dropout import token_dropout
from lightning_longctx.models.tensor_plan import TensorPlan
from tests.attention.ring_calls import selective
from tests.cases.tiny import make_trainer, samples

P, LENGTH = 0.5, 64


class Masks(LightningModule):
    """Records what dropout leaves of ones: attention's by eye-like values, states' of our own, and ``nn.Dropout``'s."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.theirs = nn.Dropout(P)
        self.unused = nn.Linear(4, 4, bias=False)  # tensor ranks need something to share
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        record, positions = batch["sequence"], batch["position_ids"]
        query = key = torch.zeros(1, 4 // record.tensor, positions.shape[1], LENGTH) + self.weight
        # Every query sees every key with weight 1 / LENGTH, and a key's value says where it stands.
        value = F.one_hot(positions, LENGTH).float()[:, None].expand_as(query)
        out = attend(query, key, value, sequence=record, causal=False, dropout_p=P, num_heads=4)
        states = token_dropout(torch.ones(1, positions.shape[1] // record.tensor, 512), P, record)
        theirs = self.theirs(torch.ones(1, positions.shape[1], 512))
        kept = {"attention": out.detach() > 0, "ours": states > 0, "theirs": theirs > 0}
        self.seen.append({"positions": positions, **kept})
        return out.sum() * 0

    def tensor_parallel_plan(self) -> TensorPlan:
        return {"unused": ColwiseParallel()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def masks(degrees: Degrees, layout: str) -> list[dict[str, Tensor]]:
    """What this rank recorded in two steps of one sequence each; processes start from one seed."""
    torch.manual_seed(0)
    module = Masks()
    batches = [{key: value[None] for key, value in sample.items()} for sample in samples(2, LENGTH)]
    make_trainer(degrees, layout).fit(module, DataLoader(batches, batch_size=None))  # type: ignore
    return module.seen


def agreement(one: Tensor, other: Tensor) -> float:
    return float((one == other).double().mean())


@pytest.mark.parametrize(
    ("degrees", "layout"), [(Degrees(context=4, inner_ring=2), "zigzag"), (Degrees(context=2, head=2), "striped")]
)
def test_the_mask_of_a_token_is_the_same_for_every_layout_and_degree(gloo, degrees, layout):
    """B57: shards draw the same mask, or replicas unlike ones."""
    alone = gloo(1).run(masks, Degrees(context=1), "contiguous")[0]
    ranks = gloo(4).run(masks, degrees, layout)
    for step, whole in enumerate(alone):
        for rank in ranks:
            places = rank[step]["positions"][0]
            assert torch.equal(rank[step]["ours"], whole["ours"][:, places])
            assert torch.equal(rank[step]["attention"], whole["attention"][:, :, places])
        for name in ("ours", "theirs"):
            for one, other in ((0, 1), (0, 3), (1, 2)):
                assert abs(agreement(ranks[one][step][name], ranks[other][step][name]) - 0.5) < 0.03, name
    for rank in (alone, *ranks):
        for name, allowed in (("attention", 0.06), ("ours", 0.03), ("theirs", 0.03)):
            assert abs(agreement(rank[0][name], rank[1][name]) - 0.5) < allowed, name


def test_tensor_ranks_drop_the_same_where_they_hold_the_same_and_their_part_elsewhere(gloo):
    """B57: of heads and tokens each has its part of what one process draws; ``nn.Dropout`` on whole states agrees."""
    alone = gloo(1).run(masks, Degrees(context=1), "contiguous")[0]
    ranks = gloo(4).run(masks, Degrees(context=2, tensor=2), "zigzag")
    for number, rank in enumerate(ranks):
        for step, whole in enumerate(alone):
            places = rank[step]["positions"][0]
            heads, tokens = whole["attention"].chunk(2, dim=1), places.chunk(2)
            assert torch.equal(rank[step]["attention"], heads[number % 2][:, :, places])
            assert torch.equal(rank[step]["ours"], whole["ours"][:, tokens[number % 2]])
            assert torch.equal(rank[step]["theirs"], ranks[number - number % 2][step]["theirs"])
    assert abs(agreement(ranks[0][0]["theirs"], ranks[2][0]["theirs"]) - 0.5) < 0.03


def block(states: Tensor, sequence: None = None) -> Tensor:
    heads = states.unflatten(-1, (2, -1)).transpose(1, 2)
    found = attend(heads, heads * 2, heads, dropout_p=P).transpose(1, 2).flatten(2)
    return F.dropout(states + token_dropout(found, P), P).sin()


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_draws_the_same_dropout(kind):
    """B29 (a): gradients are those without checkpointing, bit for bit, whatever is drawn in between."""

    def gradients(call: Any) -> Tensor:
        torch.manual_seed(0)
        states = torch.randn(1, 24, 16, requires_grad=True)
        with drawing(StepDraws(1)):
            out = call(call(states))
            torch.rand(5)
            out.square().sum().backward()
        assert states.grad is not None
        return states.grad

    options: dict[str, Any] = {"context_fn": selective} if kind == "selective" else {}
    expected = gradients(block)
    assert torch.equal(gradients(lambda x: checkpoint(block, x, use_reentrant=False, **options)), expected)
