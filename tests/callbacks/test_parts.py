"""The pure parts of the callbacks."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_longctx.callbacks.memory import max_and_min, peaks
from lightning_longctx.callbacks.throughput import Stopwatch, ThroughputCallback, cut_batches, num_tokens
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.strategy.gradients.norms import gradient_norm


def cut(num_rows: int, length: int, num_valid_tokens: int) -> dict:
    return {
        "input_ids": torch.zeros(num_rows, length // 4, dtype=torch.int64),
        "sequence": SequenceRecord(length, num_ranks=4, num_valid_tokens=num_valid_tokens),
    }


def test_a_token_is_counted_once_however_many_ranks_share_the_sequence() -> None:
    assert num_tokens(cut(2, 64, num_valid_tokens=100)) == 100
    assert num_tokens(cut(2, 64, num_valid_tokens=0)) == 0
    assert num_tokens(cut(2, 64, num_valid_tokens=-1)) == 128  # no labels: all positions


def test_tokens_of_combined_loaders_add_up() -> None:
    first, second = cut(1, 32, 31), cut(3, 32, 50)
    assert num_tokens({"a": first, "b": [second, None]}) == 81
    assert num_tokens((first, second)) == 81
    assert list(cut_batches(["text", {"sequence": "no record"}, torch.zeros(3)])) == []


def test_the_stopwatch_adds_up_only_while_it_runs() -> None:
    watch = Stopwatch()
    watch.start()
    time.sleep(0.02)
    watch.start()
    watch.stop()
    seconds = watch.seconds
    time.sleep(0.05)
    watch.stop()
    assert 0.02 <= watch.seconds == seconds
    watch.start()
    watch.stop()
    assert seconds < watch.seconds < seconds + 0.05


def test_warmup_steps_are_checked() -> None:
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        ThroughputCallback(warmup_steps=-1)


def test_gradient_norm_is_the_norm_of_all_gradients() -> None:
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (2,))]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn_like(parameter)
    expected = torch.cat([parameter.grad.flatten() for parameter in parameters[:2]]).norm()
    torch.testing.assert_close(gradient_norm(iter(parameters)), expected)
    assert gradient_norm([]) == 0


def test_peak_memory_is_this_process_in_gib() -> None:
    (before,) = peaks(torch.device("cpu"))
    held = torch.ones(2**26)  # a quarter GiB
    (after,) = peaks(torch.device("cpu"))
    assert 0.01 < before <= after < 100
    assert held.sum() == 2**26
    assert max_and_min(torch.tensor([1.0, -2.0])) == ([1.0, -2.0], [1.0, -2.0])
