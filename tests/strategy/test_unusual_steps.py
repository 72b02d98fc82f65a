"""Steps that users really write: labels masked late, hand-made means, several backwards, drifting random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_longctx.strategy.steps import check_same_batches
from lightning_longctx.testing import GlooPool, RankError, assert_all_close_relative
from lightning_longctx.topology import Degrees
from tests.strategy.modules import Plain, samples
from tests.strategy.runs import Run, trainer, weights

Pools = Callable[[int], GlooPool]
MASK_EVERY = 3


class Unusual(Plain):
    """A step of some kind."""

    kind = "mean"

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return masked(batch) if self.kind == "masked in hook" else batch

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        if self.kind == "masked in step":
            masked(batch)
        logits = self(batch["input_ids"], batch["position_ids"]).flatten(0, 1)
        labels = batch["shift_labels"].flatten()
        if self.automatic_optimization and not self.kind.startswith("by hand"):
            return F.cross_entropy(logits, labels)
        valid = (labels != -100).float()
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        if self.kind == "by hand: squeezed":
            return ((losses * valid).sum(0, keepdim=True) / valid.sum(0, keepdim=True)).squeeze()
        if self.kind == "by hand: weights":
            return (losses * (valid / valid.sum())).sum()
        return self.step_twice(F.cross_entropy(logits, labels))

    def step_twice(self, loss: Tensor) -> Tensor:
        """Two backwards; the second loss touches no block, and may have been made before the first backward."""
        optimizer: Any = self.optimizers()
        penalty = self.head.weight.square().mean() if self.kind == "manual, made before" else None
        if self.kind != "manual, penalty alone":
            self.manual_backward(loss)
        self.manual_backward(self.head.weight.square().mean() if penalty is None else penalty)
        optimizer.step()
        optimizer.zero_grad()
        return loss


def masked(batch: dict[str, Any]) -> dict[str, Any]:
    batch["shift_labels"] = torch.where(batch["position_ids"] % MASK_EVERY == 0, -100, batch["shift_labels"])
    return batch


def fit(kind: str, degrees: Degrees, sharding: str = "replicate", mask_data: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(7)
    module = Unusual("manual" if kind.startswith("manual") else "self")
    module.kind = kind
    made = samples(6)
    if mask_data:
        for sample in made:
            sample["labels"][1::MASK_EVERY] = -100  # the target of position 0 is label 1
    run = Run(degrees, layout="contiguous", sharding=sharding)
    trainer(run, torch.distributed.get_world_size()).fit(module, DataLoader(made, batch_size=1))  # type: ignore
    return weights(module)


@pytest.mark.parametrize("kind", ["masked in hook", "masked in step"])
def test_labels_masked_after_collate_count_as_they_are(gloo: Pools, kind: str) -> None:
    expected = gloo(1).run(fit, "mean", Degrees(), mask_data=True)[0]
    for world, degrees in ((1, Degrees()), (2, Degrees(context=2))):
        assert_all_close_relative(gloo(world).run(fit, kind, degrees)[0], expected)


@pytest.mark.parametrize("kind", ["by hand: squeezed", "by hand: weights"])
def test_means_by_hand_over_no_label_are_nothing(gloo: Pools, kind: str) -> None:
    expected = gloo(1).run(fit, "mean", Degrees())[0]
    assert_all_close_relative(gloo(2).run(fit, kind, Degrees(context=2))[0], expected)


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
@pytest.mark.parametrize("kind", ["manual, made after", "manual, made before", "manual, penalty alone"])
def test_a_second_loss_that_touches_no_block(gloo: Pools, kind: str, sharding: str) -> None:
    expected = gloo(1).run(fit, kind, Degrees(), sharding)[0]
    start = gloo(1).run(fit, "mean", Degrees(), sharding)[0]
    assert not torch.equal(expected["head.weight"], start["head.weight"])
    assert_all_close_relative(gloo(2).run(fit, kind, Degrees(context=2), sharding)[0], expected)


class Drawn(Dataset):
    """Draws its samples from torch's default generator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(32, (16,))
        return {"input_ids": tokens, "labels": tokens}


class Drifting(Plain):
    """Rank 0 alone uses random numbers, for a sample of text, say; notes what it trained on."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            torch.rand(3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(batch["sequence"].checksum)


def drift(dataset: Any, shuffle: bool) -> list[float]:
    module = Drifting()
    run = Run(Degrees(context=2))
    trainer(run, 2, max_epochs=2).fit(module, DataLoader(dataset, batch_size=1, shuffle=shuffle))
    return module.losses


def test_ranks_that_read_different_samples_are_told_so(gloo: Pools) -> None:
    with pytest.raises(RankError, match="read other samples") as caught:
        gloo(2).run(drift, Drawn(), False)
    assert len(caught.value.failures) == 2, "every rank says it"


def test_shuffling_does_not_drift_apart(gloo: Pools) -> None:
    first, second = gloo(2).run(drift, samples(6), True)
    assert first == second and first[:6] != first[6:] and sorted(first[:6]) == sorted(first[6:])


def test_checksums_are_compared_within_a_data_rank() -> None:
    check_same_batches([[1, 1], [2, 2]])
    with pytest.raises(ValueError, match=r"data rank 1 share samples, but ranks \[1\]"):
        check_same_batches([[1, 1], [2, 3]])


class UnlikeDocuments(Drawn):
    """The same tokens on every rank, packed in other documents on each."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(24)
        cut = (10, 3)[dist.get_rank()]
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.cat([tokens[:cut], tokens[: 24 - cut]])}


def read_unlike_documents(stage: str, layout: str) -> None:
    run = Run(Degrees(context=2), layout=layout)
    loader = DataLoader(UnlikeDocuments(), batch_size=1)
    getattr(trainer(run, 2, max_epochs=1), stage)(Drifting(), loader)


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_unlike_documents_are_noticed_before_attention_sends_anything(gloo: Pools, stage: str, layout: str) -> None:
    """Messages of unlike sizes would abort gloo, or be waited for without end."""
    with pytest.raises(RankError, match="read other samples") as caught:
        gloo(2).run(read_unlike_documents, stage, layout)
    assert len(caught.value.failures) == 2
