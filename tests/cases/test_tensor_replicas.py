"""Parameters that tensor ranks hold as copies: their gradients are sums over ranks, and the copies stay equal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.data import DataLoader

from lightning_longctx import Degrees, LongContextMixin
from lightning_longctx.models.tensor_plan import TensorPlan
from tests.cases.tiny import Gradients, assert_equal_numbers, make_trainer, named_weights, samples

VOCAB, WIDTH, HEADS = 32, 16, 4


class Layer(nn.Module):
    """Attention and an MLP with biases, norms in front."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)
        self.gather, self.gather_again = nn.Identity(), nn.Identity()

    def forward(self, states: Tensor) -> Tensor:
        normed = self.gather(self.norm(states))
        heads = (
            p(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        states = states + self.output(found.transpose(1, 2).flatten(2))
        return states + self.down(F.gelu(self.up(self.gather_again(self.mlp_norm(states)))))


class Biased(LongContextMixin, LightningModule):
    """A user's module, which says how tensor ranks share it: tokens between matrices, as our decoder's do."""

    def __init__(self, sequence_parallel: bool, optimizer: Any) -> None:
        super().__init__(optimizer=optimizer)
        self.sequence_parallel = sequence_parallel
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def tensor_parallel_plan(self) -> TensorPlan:
        split = Shard(1) if self.sequence_parallel else Replicate()
        plan: dict[str, Any] = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
            **{f"layers.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")},
            **{f"layers.*.{name}": RowwiseParallel(output_layouts=split) for name in ("output", "down")},
            "head": ColwiseParallel(input_layouts=split, output_layouts=Replicate()),
        }
        if self.sequence_parallel:
            gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            plan |= {f"layers.*.{name}": gather for name in ("gather", "gather_again")}
            plan |= {name: SequenceParallel() for name in ("layers.*.norm", "layers.*.mlp_norm", "norm")}
        return plan

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states)
        return self.head(self.norm(states))

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["shift_labels"].flatten())


Found = tuple[list[dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]


def trained(degrees: Degrees, steps: int, sequence_parallel: bool, optimizer: Any, **options: Any) -> Found:
    """Gradients of every step, whole weights, and what this rank itself holds of weights that are copies."""
    torch.manual_seed(0)
    module, gradients = Biased(sequence_parallel, optimizer), Gradients()
    trainer = make_trainer(degrees, callbacks=[gradients], **options)
    trainer.fit(module, DataLoader(samples(steps), batch_size=1))  # type: ignore[arg-type]
    held = {}
    for name, weight in module.named_parameters():
        if isinstance(weight, DTensor) and all(placement.is_replicate() for placement in weight.placements):
            held[name] = weight.to_local().detach().clone()
    return gradients.steps, named_weights(module), held


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("num_ranks", "degrees"), [(2, Degrees(tensor=2)), (4, Degrees(context=2, tensor=2))])
def test_norms_and_biases_get_the_sum_over_ranks(gloo, num_ranks, degrees, sequence_parallel):
    """B30: forward adds a bias once; gradients of norms and biases are sums, not means, nor one rank's part."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    expected, weights, _ = gloo(1).run(trained, Degrees(), 2, sequence_parallel, sgd)[0]
    for found, found_weights, _ in gloo(num_ranks).run(trained, degrees, 2, sequence_parallel, sgd):
        for step, expected_step in zip(found, expected, strict=True):
            assert_equal_numbers(step, expected_step, 1e-6)
        assert_equal_numbers(found_weights, weights, 1e-6)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_copies_stay_equal_to_the_bit(gloo, sequence_parallel):
    """B30: after three steps of Adam, which makes whole steps of the smallest difference."""
    adam = partial(torch.optim.Adam, lr=0.01)
    first, *others = gloo(4).run(trained, Degrees(context=2, tensor=2), 3, sequence_parallel, adam)
    names = {name.rpartition(".")[0].rpartition(".")[2] for name in first[2]}
    assert {"norm", "mlp_norm", "output", "down"} <= names
    for _, _, held in others:
        assert held.keys() == first[2].keys()
        assert [name for name, weight in held.items() if not torch.equal(weight, first[2][name])] == []
