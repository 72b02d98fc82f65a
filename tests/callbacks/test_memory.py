"""Which part of a step is named as the one with the peak: with a counter that tests move, and with real memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.utils.data import DataLoader

from lightning_longctx import Degrees
from lightning_longctx.callbacks import PeakMemory, memory
from lightning_longctx.callbacks.memory import decoded, encoded
from lightning_longctx.callbacks.peak_region import PeakRegion, differentiable
from lightning_longctx.memory.resident import reset_peak
from tests.callbacks.tiny import Tiny, curves, fit

Rises = dict[str, list[int]]
MIB = 2**20


class Counter:
    """Stands in for the peak: rises by a number of bytes where a place is passed."""

    def __init__(self, rises: Rises) -> None:
        self.rises, self.bytes = {place: list(each) for place, each in rises.items()}, 1000 * MIB

    def pass_by(self, place: str) -> None:
        if self.rises.get(place):
            self.bytes += self.rises[place].pop(0) * MIB


class Passing(torch.autograd.Function):
    """Nothing but a place, forward and backward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, counter: Counter, place: str) -> Tensor:
        ctx.counter, ctx.place = counter, place
        counter.pass_by(f"{place} forward")
        return states.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.counter.pass_by(f"{ctx.place} backward")
        return grad, None, None


class Block(nn.Module):
    def __init__(self, counter: Counter, place: str) -> None:
        super().__init__()
        self.counter, self.place = counter, place
        self.linear = nn.Linear(8, 8)

    def forward(self, states: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
        self.counter.pass_by(f"{self.place} called")
        return states + Passing.apply(self.linear(states), self.counter, self.place) * scale, None


class Stacked(Tiny):
    """Two stacks of two blocks, and places before, between and after them."""

    def __init__(self, counter: Counter, recompute: bool = False) -> None:
        super().__init__()
        self.counter = counter
        self.first = nn.ModuleList(Block(counter, f"first.{place}") for place in range(2))
        self.second = nn.ModuleList(Block(counter, f"second.{place}") for place in range(2))
        for block in (*self.first, *self.second) if recompute else ():
            checkpoint(block)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        states = Passing.apply(self.tokens(batch["input_ids"]), self.counter, "embedding")
        q, k, v = self.qkv(states).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        states = states + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        for block in self.first:
            states, _ = block(states)
        states = Passing.apply(states, self.counter, "between")
        for block in self.second:
            states, _ = block(states=states) if block.place == "second.0" else block(states)
        logits = self.head(Passing.apply(states, self.counter, "head"))
        labels = batch["shift_labels"].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self.counter.pass_by("optimizer"))
        return optimizer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.counter.pass_by("start")

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", self(batch), sync_dist=True)


class Names(Callback):
    """Collects what is named after each step."""

    def __init__(self, watched: PeakMemory) -> None:
        self.watched, self.names = watched, []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.names.append(self.watched.region)


def texts(folder: Path) -> list[tuple[int, str]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("peak_memory_region")]
    return [(event.step, event.tensor_proto.string_val[0].decode()) for tag in tags for event in events.Tensors(tag)]


def run_counted(folder: Path, rises: Rises, recompute: bool = False, **options: Any) -> list[str]:
    """Train with a counter that rises so; what was named after each step."""
    counter, counts = Counter(rises), memory.peaks_in_bytes
    memory.peaks_in_bytes = lambda device: [counter.bytes]
    try:
        watched = PeakMemory()
        names = Names(watched)
        options = {"num_samples": 3, "log_every_n_steps": 1, "max_steps": 3, **options}
        fit(folder, Degrees(), callbacks=[watched, names], module=Stacked(counter, recompute), **options)
        return names.names
    finally:
        memory.peaks_in_bytes = counts


@pytest.fixture
def named(gloo: Any) -> Callable[..., list[str]]:
    """``run_counted`` in another process."""
    return lambda *args, **options: gloo(1).run(run_counted, *args, **options)[0]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("place", "region"),
    [
        ("start", "forward"),
        ("embedding forward", "forward"),
        ("first.0 forward", "forward of first.0"),
        ("first.1 forward", "forward of first.1"),
        ("between forward", "forward"),
        ("second.1 forward", "forward of second.1"),
        ("head forward", "loss"),
        ("head backward", "loss"),
        ("second.1 backward", "backward of second.1"),
        ("second.0 backward", "backward of second.0"),
        ("between backward", "backward"),
        ("first.1 backward", "backward of first.1"),
        ("first.0 backward", "backward of first.0"),
        ("embedding backward", "backward"),
        ("optimizer", "optimizer step"),
    ],
)
def test_regions(tmp_path: Path, named: Callable, place: str, region: str, recompute: bool) -> None:
    assert named(tmp_path, {place: [20]}, recompute, max_steps=1) == [region]


def test_what_runs_again_is_part_of_backward(tmp_path: Path, named: Callable) -> None:
    """The second call of ``first.1`` is its recomputation."""
    assert named(tmp_path, {"first.1 called": [0, 20]}, True, max_steps=1) == ["backward of first.1"]


def test_the_last_rise_counts_and_is_written_when_it_changes(tmp_path: Path, named: Callable) -> None:
    # Five of 1050 MiB are the wavering of a count.
    rises = {"first.0 forward": [50, 0, 0], "head forward": [0, 0, 50], "optimizer": [0, 5, 0]}
    assert named(tmp_path, rises) == ["forward of first.0"] * 2 + ["loss"]
    assert texts(tmp_path) == [(0, "forward of first.0: 1.025 GiB"), (2, "loss: 1.079 GiB")]
    assert [step for step, _ in curves(tmp_path)["peak_memory_gib_max"]] == [0, 1, 2]


def test_accumulation_and_validation(tmp_path: Path, named: Callable) -> None:
    rises = {"second.0 backward": [0, 20]}
    names = named(tmp_path / "accumulated", rises, accumulate_grad_batches=3, max_steps=1)
    assert names == ["", "", "backward of second.0"]
    rises = {"first.0 forward": [0] * 3 + [20]}  # the fourth is in validation
    often = dict(num_samples=6, max_steps=4, validate=True, val_check_interval=3)
    assert named(tmp_path / "validated", rises, **often)[-1] == "outside of training steps"


def test_hooks_go_and_other_loggers_are_left_alone(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ZeroDivisionError

    for callbacks in ([], [Stops()]):
        watched, module = PeakMemory(), Stacked(Counter({}))
        trainer = Trainer(
            accelerator="cpu", max_steps=1, logger=CSVLogger(tmp_path), callbacks=[watched, *callbacks],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        )  # fmt: skip
        batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "shift_labels": torch.ones(1, 8, dtype=torch.int64)}
        if callbacks:
            with pytest.raises(ZeroDivisionError):
                trainer.fit(module, DataLoader(cast("Any", [batch]), batch_size=None))
        else:
            trainer.fit(module, DataLoader(cast("Any", [batch]), batch_size=None))
            assert watched.region
        assert all(not block._forward_hooks and not block._forward_pre_hooks for block in module.first)


def test_a_counter_that_was_reset_begins_anew() -> None:
    values = iter([100, 100, 50, 60, 60])
    region = PeakRegion(nn.Linear(2, 2), lambda: next(values))
    region.enter("forward")
    region.enter("loss")
    region.enter("backward")
    assert region.found == "loss"


def test_peaks_and_regions_in_one_number() -> None:
    most = encoded(2**41, 2**16 - 1)
    assert decoded(most) == 2**16 - 1 and float(torch.tensor(most, dtype=torch.float64)) == most
    assert encoded(2**30 + 1024, 0) > encoded(2**30, 9) and decoded(encoded(2**30 + 1024, 7)) == 7


def test_a_tensor_in_whatever_a_block_returns() -> None:
    wanted = torch.ones(1, requires_grad=True)
    assert differentiable({"a": torch.ones(1), "b": (None, [wanted])}) is wanted
    assert differentiable((torch.ones(1), "text", None)) is None


def test_blocks_in_compiled_code_stay_in_one_graph() -> None:
    torch._dynamo.reset()
    body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    region = PeakRegion(nn.ModuleDict({"blocks": nn.ModuleList(body)}), lambda: 0)
    region.begin_step()
    torch.compile(body, backend=backend, fullgraph=True)(torch.randn(3, 8))
    assert len(graphs) == 1
    assert body[0]._forward_hooks
    region.remove()


class Heavy(Stacked):
    """Takes memory, really: the second block of the second stack on the last rank."""

    def __init__(self) -> None:
        super().__init__(Counter({}))
        self.calls = 0
        self.second[1].register_forward_hook(self._take)

    def _take(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls += 1
        if self.calls > 1:  # the first step imports much
            torch.ones((100 + 200 * dist.get_rank()) * MIB // 4)


def run_heavy(folder: str, degrees: Degrees) -> tuple[list[str], bool]:
    resets = reset_peak()
    watched = PeakMemory()
    names = Names(watched)
    fit(folder, degrees, 3, [watched, names], module=Heavy(), log_every_n_steps=1, max_steps=3)
    return names.names[1:], resets


def test_all_ranks_name_the_region_of_the_largest_peak(tmp_path: Path, gloo: Any) -> None:
    found = gloo(2).run(run_heavy, str(tmp_path), Degrees(context=2))
    if not all(resets for _, resets in found):
        pytest.skip("this system keeps no peak that can be reset")
    assert [names for names, _ in found] == [["forward of second.1"] * 2] * 2
    high, low = (curves(tmp_path)[f"peak_memory_gib_{name}"][2][1] for name in ("max", "min"))
    assert high - low > 0.1
    step, text = texts(tmp_path)[-1]
    assert step == 1 and text.startswith("forward of second.1: ")
