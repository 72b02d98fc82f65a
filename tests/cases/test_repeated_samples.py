"""Samples that do not divide among data ranks: each counts once, in means over an epoch and in the last step."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees
from tests.cases.tiny import (
    LEARNING_RATE,
    assert_equal_numbers,
    make_trainer,
    named_weights,
    samples,
    tiny_decoder,
    tiny_module,
    token_losses,
)

COUNTED = dict(use_distributed_sampler=True)


def loader(count: int, batch_size: int, **options: Any) -> DataLoader:
    """On every rank the whole data."""
    return DataLoader(samples(count), batch_size=batch_size, **options)  # type: ignore[arg-type]


class Steps(CausalLM):
    """Counts its steps, and whether they had labels."""

    labelled: list[bool]

    def validation_step(self, batch: dict[str, Any], *args: Any) -> None:
        self.labelled.append(batch["sequence"].num_valid_tokens > 0)
        super().validation_step(batch, *args)


def evaluated(degrees: Degrees, count: int, batch_size: int) -> tuple[dict[str, float], list[bool], list[str]]:
    """Metrics of validation and test, which steps had labels, and what was warned of."""
    module = tiny_module()
    module.__class__ = Steps
    module.labelled = []  # type: ignore[assignment]
    trainer = make_trainer(degrees, **COUNTED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        [validated] = trainer.validate(module, loader(count, batch_size), verbose=False)
        [tested] = trainer.test(module, loader(count, batch_size), verbose=False)
    said = [str(warning.message) for warning in caught if "without labels" in str(warning.message)]
    return dict(validated) | dict(tested), module.labelled, said  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("num_ranks", "degrees", "count", "batch_size", "absent"),
    [
        (2, Degrees(data=2), 5, 1, [1]),
        (4, Degrees(data=4), 5, 1, [1, 2, 3]),
        (4, Degrees(data=2, context=2), 5, 2, [2, 3]),
        (2, Degrees(data=2), 7, 2, []),
    ],
)
def test_no_sequence_counts_twice(
    gloo: Any, num_ranks: int, degrees: Degrees, count: int, batch_size: int, absent: list[int]
) -> None:
    """B49: validation and test equal a single process over exactly these sequences; ranks take the same steps."""
    loss = token_losses(tiny_decoder(), samples(count)).mean().item()
    results = gloo(num_ranks).run(evaluated, degrees, count, batch_size)
    for rank, (metrics, labelled, said) in enumerate(results):
        expected = {f"{stage}_{name}": value for stage in ("val", "test") for name, value in values(loss).items()}
        assert metrics == pytest.approx(expected, rel=1e-6)
        assert labelled == [True] * (len(labelled) - 1) + [rank not in absent]
        assert len(labelled) == len(results[0][1])
        assert len(said) == (2 if absent and rank == 0 else 0)


def values(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": math.exp(loss)}


def trained(degrees: Degrees, count: int, batch_size: int, drop_last: bool) -> dict[str, Tensor]:
    module = tiny_module()
    trainer = make_trainer(degrees, max_epochs=2, **COUNTED)
    trainer.fit(module, loader(count, batch_size, drop_last=drop_last))
    return named_weights(module.decoder)


@pytest.mark.parametrize(
    ("degrees", "batch_size", "drop_last"),
    [
        (Degrees(data=4), 1, False),
        (Degrees(data=2, context=2), 2, False),
        (Degrees(data=4), 1, True),
        (Degrees(data=2, context=2), 2, True),
    ],
)
def test_the_last_step_of_an_epoch(gloo: Any, degrees: Degrees, batch_size: int, drop_last: bool) -> None:
    """B49: in training too, whatever the ranks: 5 samples in steps of 4 make a step of one sample, or none."""
    decoder, made = tiny_decoder(), samples(5)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=LEARNING_RATE)
    for _ in range(2):
        for window in [made[:4], made[4:]][: 1 if drop_last else 2]:
            optimizer.zero_grad()
            token_losses(decoder, window).mean().backward()
            optimizer.step()
    expected = {name: weight.detach() for name, weight in decoder.named_parameters()}
    for found in gloo(4).run(trained, degrees, 5, batch_size, drop_last):
        assert_equal_numbers(found, expected)


def unlabelled(degrees: Degrees) -> str:
    """The error of this rank, which then waits for all others."""
    made = [{"input_ids": sample["input_ids"]} for sample in samples(5)]
    try:
        make_trainer(degrees, **COUNTED).validate(tiny_module(), DataLoader(made), verbose=False)  # type: ignore
    except ValueError as error:
        dist.barrier()
        return str(error)
    return ""


def test_without_labels_a_repeated_sample_is_refused(gloo: Any) -> None:
    """B49: nothing could leave it out; every rank says so with the first batch."""
    for message in gloo(2).run(unlabelled, Degrees(data=2)):
        assert "gives 2 data ranks of batch_size=1 no sample for each" in message and "drop_last=True" in message


def predicted(count: int) -> tuple[list[list[int]], str]:
    """The tokens that this rank has predicted from, and the error's message."""
    module = tiny_module()
    module.predict_step = lambda batch, *_: batch["input_ids"].tolist()  # type: ignore[method-assign]
    try:
        batches = make_trainer(Degrees(data=2), **COUNTED).predict(module, loader(count, 1))
    except ValueError as error:
        dist.barrier()
        return [], str(error)
    return [row for batch in batches or [] for row in batch], ""  # type: ignore[attr-defined]


def test_predictions_are_of_every_sample_once(gloo: Any) -> None:
    """B49: or none are made, where data ranks would take other numbers of steps."""
    (one, _), (two, _) = gloo(2).run(predicted, 4)
    rows = [sample["input_ids"].tolist() for sample in samples(4)]
    assert sorted(one + two) == sorted(rows) and len(one) == 2
    for _, message in gloo(2).run(predicted, 5):
        assert "have [3, 2] batches" in message
