"""The random state of all ranks in a checkpoint: plain, complete, and kept once where ranks share it."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

from lightning_longctx.strategy.checkpoints.random_state import by_rank, of_rank, random_state, set_random_state

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [random.gauss(0, 1), np.random.randn(), float(np.random.rand()), float(torch.randn(())), random.random()]


def test_every_generator_goes_on_after_a_file() -> None:
    before = random_state(CPU)
    try:
        draw()  # gauss keeps every second number
        file = io.BytesIO()
        torch.save(random_state(CPU), file)
        expected = draw(), draw()
        file.seek(0)
        set_random_state(torch.load(file, weights_only=True), CPU)
        assert (draw(), draw()) == expected
    finally:
        set_random_state(before, CPU)


def test_ranks_that_share_a_state_share_its_copy() -> None:
    one = random_state(CPU)
    torch.rand(1)
    other = random_state(CPU)
    saved = by_rank([one, other, random_state(CPU), one])
    assert len(saved["distinct"]) == 2 and saved["by_rank"] == [0, 1, 1, 0]
    for rank, state in enumerate((one, other, other, one)):
        assert torch.equal(of_rank(saved, rank)["torch"], state["torch"])
