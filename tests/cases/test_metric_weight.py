"""The weight that Lightning gives a batch in a mean over an epoch: its number of rows, whatever else it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_longctx import Degrees, LongContextMixin
from tests.cases.tiny import LENGTH, SGD, make_trainer


class BothWays(LongContextMixin, LightningModule):
    """The loss of a token is its label: logged plainly, and with its count."""

    def __init__(self) -> None:
        super().__init__(optimizer=SGD)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def validation_step(self, batch: dict[str, Any]) -> None:
        counted = batch["shift_labels"][batch["shift_labels"] != -100].double()
        self.log("plain", counted.mean(), on_step=False, on_epoch=True)
        self.log_tokens("counted", counted.sum(), counted.numel())


class Batches:
    """An iterable that is no ``DataLoader``."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def validated(wrapped: bool) -> dict[str, float]:
    """Metrics over batches that begin with offsets of 3 and 9 entries and have losses 1 and 3."""
    batches = []
    for loss, offsets in ((1, 3), (3, 9)):
        labels = torch.full((1, LENGTH), -100)
        labels[0, :4] = loss
        entries = {"cu_seqlens": torch.arange(offsets), "input_ids": torch.zeros(1, LENGTH, dtype=torch.int64)}
        batches.append(entries | {"shift_labels": labels})
    data: Any = DataLoader(batches, batch_size=None) if wrapped else Batches(batches)  # type: ignore[arg-type]
    return dict(make_trainer(Degrees()).validate(BothWays(), data, verbose=False)[0])


@pytest.mark.parametrize("wrapped", [True, False])
def test_offsets_that_come_first_do_not_weigh(gloo: Any, wrapped: bool) -> None:
    """B50: losses 1 and 3 over as many tokens make 2.0, where the length of the offsets would make 2.5."""
    [metrics] = gloo(1).run(validated, wrapped)
    assert metrics == pytest.approx({"plain": 2.0, "counted": 2.0}, rel=1e-6)
