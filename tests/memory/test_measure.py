"""What a measured step predicts, against what other policies then take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import profile

from lightning_longctx.loss import token_cross_entropy
from lightning_longctx.memory.checkpointed import CheckpointedBlocks
from lightning_longctx.memory.choice.costs import predict
from lightning_longctx.memory.choice.live_bytes import Stretch, live_bytes, stretches
from lightning_longctx.memory.choice.measure import StepMeter
from lightning_longctx.memory.choice.solve import solve
from lightning_longctx.memory.choice.table import fixed_plans
from lightning_longctx.memory.policy import Checkpointing
from lightning_longctx.models import Decoder, DecoderConfig

CPU = torch.device("cpu")
TOKENS = 512


class Trained:
    """A decoder in steps of which the gradients of the last one are freed after forward, as in Lightning."""

    def __init__(self):
        torch.manual_seed(0)
        self.module = Decoder(DecoderConfig(vocab_size=97, width=64, num_layers=4, num_heads=4))
        self.tokens = torch.randint(97, (1, TOKENS))
        self.blocks = CheckpointedBlocks(self.module, Checkpointing("full"), CPU)

    def step(self):
        total, count = token_cross_entropy(self.module(self.tokens), self.tokens)
        self.module.zero_grad()
        (total / count).backward()

    def peak(self, plan):
        self.blocks.use(plan)
        self.step()
        self.module.zero_grad()
        live = live_bytes(CPU, self.module)
        live.start()
        self.step()
        return max(stretch.peak for stretch in live.stop())


@pytest.fixture(scope="module")
def trained():
    return Trained()


@pytest.fixture(scope="module")
def costs(trained):
    trained.step()
    trained.module.zero_grad()
    meter = StepMeter(trained.blocks.blocks, trained.module, CPU, ())
    meter.begin()
    trained.step()
    return meter.end()


@pytest.mark.parametrize("name", ["none", "selective", "full"])
def test_the_peak_of_fixed_policies(trained, costs, name):
    plan = fixed_plans(costs)[name]
    assert predict(costs, plan).peak_bytes == pytest.approx(trained.peak(plan), rel=0.1)


@pytest.mark.parametrize("share", [index / 9 for index in range(10)])
def test_the_peak_of_solved_plans(trained, costs, share):
    plans = fixed_plans(costs)
    least, most = (predict(costs, plans[name]).peak_bytes for name in ("full", "none"))
    budget = int(least + share * (most - least))
    plan = solve(costs, budget)
    predicted = predict(costs, plan)
    assert predicted.peak_bytes <= budget
    assert predicted.peak_bytes == pytest.approx(trained.peak(plan), rel=0.1)


@pytest.mark.parametrize("share", [0.15, 0.25])
def test_the_peak_of_plans_that_offload(trained, costs, share):
    """What is on its way counts, too: budgets hold."""
    plans = fixed_plans(costs)
    least, most = (predict(costs, plans[name]).peak_bytes for name in ("full", "none"))
    budget = int(least * 1.1 + share * (most - least))
    fast_disk = replace(costs, offload_bytes_per_second=1e15)
    plan = solve(fast_disk, budget, ("attention", "mlp"))
    assert any(block.offload for block in plan.blocks)
    predicted = predict(fast_disk, plan).peak_bytes
    assert predicted <= budget
    assert trained.peak(plan) <= 1.1 * predicted


def test_what_regions_take(costs):
    width = TOKENS * 64 * 4
    regions = {region.name: region for region in costs.blocks[1].regions}
    assert regions["attention"].num_bytes == width + TOKENS * 4 * 4  # out and lse
    assert regions["attention.query"].num_bytes == width
    assert regions["mlp.down"].seconds == 0  # backward needs nothing that comes after it
    assert all(block.seconds > sum(region.seconds for region in block.regions) > 0 for block in costs.blocks)
    assert costs.seconds > sum(block.seconds for block in costs.blocks)


def test_the_moments_of_a_step(costs):
    names = [moment.name for moment in costs.moments]
    assert names[:3] == ["before the blocks", "forward of blocks.0", "between blocks"]
    assert names[-5:] == ["loss", *(f"backward of blocks.{index}" for index in (3, 2, 1, 0))]
    held = {moment.name: moment.held for moment in costs.moments}
    assert held["loss"] == (0, 1, 2, 3) and held["backward of blocks.2"] == (0, 1)


def test_allocations_between_marks():
    events = [(0, 5), (1, None), (2, 10), (3, -4), (4, None), (5, 7), (6, -13)]
    assert stretches(events, [0, 0]) == [Stretch(0, 6, 10), Stretch(6, 0, 13)]
    assert stretches(events, [0, 3]) == [Stretch(0, 3, 10), Stretch(3, -3, 10)]


def test_freed_gradients_of_the_last_step_are_known():
    weight = torch.nn.Linear(100, 100, bias=False)
    weight(torch.ones(1, 100)).sum().backward()
    live = live_bytes(CPU, weight)
    live.start()
    weight.zero_grad()
    live.mark()
    kept = torch.ones(1000)
    first, second = live.stop()
    assert first.end == -40_000 and second.end == kept.nbytes - 40_000


def test_someone_else_profiles():
    with profile(), pytest.raises(ValueError, match="Leave trainer.profiler out"):
        live_bytes(CPU, torch.nn.Linear(1, 1)).start()
