"""Parameters that some ranks use and others do not, that tensor ranks use unlike, or that are frozen for a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees
from lightning_longctx.models.tensor_plan import TensorPlan
from lightning_longctx.strategy.gradients.copies import is_packed, packed, unlike
from tests.cases.tiny import SGD, TINY, assert_equal_numbers, make_trainer, named_weights, samples
from tests.strategy.modules import Plain


class Experts(Plain):
    """Every token goes to one of two experts by its id, and to no third one: a rank may have none for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("even", "odd", "idle")})

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        states = self.embedding(input_ids)
        for name, chosen in (("even", position_ids < 4), ("odd", position_ids >= 4)):
            if chosen.any():
                states = states.index_put((chosen,), states[chosen] + self.experts[name](states[chosen]))
        for block in self.blocks:
            states = block(states)
        return self.head(states)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert all(weight.grad is None for weight in self.experts["idle"].parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)


def trained(kind: Any, degrees: Degrees, sharding: str, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = kind()
    trainer = make_trainer(degrees, "contiguous", sharding, **options)
    trainer.fit(module, DataLoader(samples(4), batch_size=1))  # type: ignore[arg-type]
    return named_weights(module)


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_experts_without_a_token_on_a_rank_get_the_gradient_of_the_others(gloo, sharding, accumulate):
    """FSDP2 alone would add up gradients of unlike experts; what nobody uses has none, and does not decay."""
    options = dict(accumulate_grad_batches=accumulate)
    expected = gloo(1).run(trained, Experts, Degrees(), sharding, **options)[0]
    for found in gloo(2).run(trained, Experts, Degrees(context=2), sharding, **options):
        assert_equal_numbers(found, expected, 1e-6)


def test_flags_in_few_numbers():
    flags = [index % 7 == 3 or index == 99 for index in range(101)]
    words = packed(flags)
    assert len(words) == 3 and all(float(word) == int(word) < 2**48 for word in words)
    assert [is_packed(words, index) for index in range(101)] == flags


def test_copies_are_compared_among_tensor_ranks():
    assert not unlike([1.0, 1.0001, 5.0, 5.0], 2)
    assert unlike([1.0, 1.0, 5.0, 5.1], 2)
    assert not unlike([0.0, 0.0], 2)


class Scaled(CausalLM):
    """A factor on states of which tensor ranks have parts, which the plan does not name."""

    def configure_model(self) -> None:
        super().configure_model()
        self.scale = nn.Parameter(torch.ones(TINY.width))
        self.decoder.norm.register_forward_pre_hook(lambda _, args: (args[0] * self.scale,))


def refused() -> str:
    torch.manual_seed(0)
    with pytest.raises(RuntimeError) as caught:
        make_trainer(Degrees(tensor=2)).fit(Scaled(TINY, optimizer=SGD), DataLoader(samples(1)))  # type: ignore[arg-type]
    return str(caught.value)


def test_a_parameter_outside_the_plan_on_parts_of_states_is_found(gloo):
    """Its copies would drift apart, and only one of them would be saved."""
    for message in gloo(2).run(refused):
        assert "the gradients of scale differ between tensor=2 ranks" in message
        assert "tensor_parallel_plan" in message


class Dropped(Plain):
    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            torch.rand(1)  # as a callback of rank 0 may

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are on several meshes."""

    def tensor_parallel_plan(self) -> TensorPlan:
        return {
            "head": ColwiseParallel(output_layouts=Replicate()),
            "blocks.*.mix": RowwiseParallel(input_layouts=Replicate()),
        }


def test_dropout_is_the_same_on_tensor_ranks_whatever_one_of_them_drew(gloo):
    expected = gloo(1).run(trained, Dropped, Degrees(), "replicate")[0]
    for found in gloo(2).run(trained, Dropped, Degrees(tensor=2), "replicate"):
        assert_equal_numbers(found, expected, 1e-6)


class Toggled(Plain):
    """Two optimizers by hand; each step is for one of them, through both."""

    def __init__(self) -> None:
        super().__init__(style="manual")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        for optimizer, factor in zip(optimizers, (1.0, -2.0), strict=True):
            self.toggle_optimizer(optimizer)
            logits = self(batch["input_ids"], batch["position_ids"]).flatten(0, 1)
            self.manual_backward(factor * F.cross_entropy(logits, batch["shift_labels"].flatten()))
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        inner = [weight for name, weight in self.named_parameters() if "blocks" in name]
        outer = [weight for name, weight in self.named_parameters() if "blocks" not in name]
        return [torch.optim.SGD(group, lr=0.1) for group in (inner, outer)]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Not of interest."""


def by_hand() -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Toggled()
    inner, outer = module.configure_optimizers()
    for sample in samples(4):
        tokens, labels = sample["input_ids"][None], sample["labels"][1:]
        for optimizer, factor in ((inner, 1.0), (outer, -2.0)):
            logits = module(tokens, torch.arange(tokens.shape[1])[None])[0, :-1]
            weights = optimizer.param_groups[0]["params"]
            loss = factor * F.cross_entropy(logits, labels)
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.grad = gradient
        inner.step()
        outer.step()
    return {name: weight.detach() for name, weight in module.named_parameters()}


@pytest.mark.parametrize(("ranks", "degrees"), [(1, Degrees()), (2, Degrees(context=2))])
def test_a_toggled_optimizer_gets_the_gradients_of_its_own_loss_only(gloo, ranks, degrees):
    for sharding in ("replicate", "fsdp"):
        found = gloo(ranks).run(trained, Toggled, degrees, sharding)[0]
        assert_equal_numbers(found, by_hand(), 1e-6)


class Shares(Plain):
    """A module, not only its parameter, is in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].mix = self.blocks[0].mix


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_blocks_may_share_a_module(gloo, sharding):
    expected = gloo(1).run(trained, Shares, Degrees(), sharding)[0]
    assert_equal_numbers(gloo(2).run(trained, Shares, Degrees(context=2), sharding)[0], expected, 1e-6)


class Silent(Plain):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch)
        return None if batch_idx % 2 else loss


def no_loss() -> str:
    with pytest.raises(ValueError) as caught:
        trained(Silent, Degrees(), "replicate", accumulate_grad_batches=2)
    return str(caught.value)


def test_no_loss_within_a_window_is_refused(gloo):
    assert "training_step returned None within an accumulation window" in gloo(1).run(no_loss)[0]


class Twice(CausalLM):
    def training_step(self, batch: dict[str, Any]) -> Tensor:
        self.log_tokens("train_loss", torch.ones(()), 1)
        return super().training_step(batch)


def logged_twice() -> str:
    with pytest.raises(ValueError) as caught:
        make_trainer(Degrees()).fit(Twice(TINY), DataLoader(samples(1)))  # type: ignore[arg-type]
    return str(caught.value)


def test_two_means_of_one_name_are_refused(gloo):
    assert "log_tokens('train_loss') was called twice in one training step" in gloo(1).run(logged_twice)[0]


class Wrapped(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def tensor_parallel_plan(self) -> Any:
        return {"inner": ColwiseParallel()}


def test_a_style_for_what_is_no_matrix_is_refused():
    from lightning_longctx.strategy.parameters.tensor_parallel import tensor_plan

    with pytest.raises(ValueError, match=r"tensor=2: the plan cuts inner, a Sequential, .* Name the matrix inside it"):
        tensor_plan(Wrapped(), 2)
