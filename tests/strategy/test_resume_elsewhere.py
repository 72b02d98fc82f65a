"""A run that goes on at any other degrees: the same weights, moments, schedule and samples, and so the same losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from lightning_longctx.models.tensor_plan import TensorPlan
from lightning_longctx.strategy import LongContextStrategy
from lightning_longctx.strategy.checkpoints.tensors import whole_optimizer_state
from lightning_longctx.testing import GlooPool
from lightning_longctx.topology import Degrees
from tests.strategy.modules import Plain, samples
from tests.strategy.runs import QUIET, weights

Pools = Callable[[int], GlooPool]
SAMPLES, SAMPLES_PER_STEP, DONE, STEPS = 12, 4, 4, 6  # three steps an epoch: the checkpoint is inside the second


class Told(Plain):
    """Tells the loss of every step over all tokens, and the samples by their first tokens."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.told: list[tuple[float, int]] = []

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        logits, labels = self(batch["input_ids"], batch["position_ids"]).flatten(0, 1), batch["shift_labels"].flatten()
        total, count = F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()
        strategy: Any = self.trainer.strategy
        sums = torch.stack([total.detach().double(), count.double(), batch["input_ids"].double().square().sum()])
        total_sum, total_count, tokens = strategy.sum_over_tokens(sums).tolist()
        self.told.append((total_sum / total_count, int(tokens)))
        return total / count

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """PyTorch's norm, which ``Plain`` looks at, knows one mesh only."""

    def tensor_parallel_plan(self) -> TensorPlan:
        return {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.mix": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)  # a large eps does not amplify rounding
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def whole_state(module: LightningModule) -> dict[str, Any]:
    optimizer: Any = module.optimizers()
    state = whole_optimizer_state(module, optimizer.optimizer)
    moments = {
        f"{number}.{key}": value.clone()
        for number, entries in state.get("state", {}).items()
        for key, value in entries.items()
    }
    return {"weights": weights(module), "moments": moments, "rate": optimizer.param_groups[0]["lr"]}


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path, self.state = path, {}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == DONE:
            trainer.save_checkpoint(self.path)
            self.state = whole_state(module)


class Looks(Callback):
    def __init__(self) -> None:
        self.state, self.step = {}, -1

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.state, self.step = whole_state(module), trainer.global_step


def train(degrees: Degrees, sharding: str, path: Path, resume: bool, one_file: bool = False) -> tuple[Any, ...]:
    """Told steps, state at the checkpoint (rank 0), its step and what was warned of."""
    torch.manual_seed(8 if resume else 7)
    module, callback = Told(), Looks() if resume else Saves(path)
    strategy = LongContextStrategy(degrees, sharding=sharding, save_distributed_checkpoint=not one_file)  # type: ignore[arg-type]
    world = torch.distributed.get_world_size()
    trainer = Trainer(strategy=strategy, devices=world, max_steps=STEPS, callbacks=[callback], **QUIET)  # type: ignore[arg-type]
    data = degrees.resolve(world).data
    assert isinstance(data, int)
    loader = DataLoader(samples(SAMPLES), batch_size=SAMPLES_PER_STEP // data, shuffle=True)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, loader, ckpt_path=path if resume else None)
    said = [str(warning.message) for warning in warned if "The checkpoint was saved at" in str(warning.message)]
    return module.told, callback.state, getattr(callback, "step", DONE), said


PLACES = {
    "one process": (1, Degrees(), "replicate"),
    "context 4": (4, Degrees(context=4), "fsdp"),
    "data 2 x context 2": (4, Degrees(data=2, context=2), "fsdp"),
    "data 4": (4, Degrees(data=4), "replicate"),
    "data 2 x context 2, replicated": (4, Degrees(data=2, context=2), "replicate"),
    "context 2 x tensor 2": (4, Degrees(context=2, tensor=2), "fsdp"),
}
WRITERS = [
    "data 2 x context 2",
    "context 2 x tensor 2",
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("one process", "context 4", "data 4")),
]


@pytest.mark.parametrize("writer", WRITERS)
def test_another_layout_goes_on(gloo: Pools, tmp_path: Path, writer: str) -> None:
    ranks, *run = PLACES[writer]
    told, state, _, _ = gloo(ranks).run(train, *run, tmp_path / "half.ckpt", False)[0]
    for reader, (other_ranks, *other_run) in PLACES.items():
        results = gloo(other_ranks).run(train, *other_run, tmp_path / "half.ckpt", True)
        (others, loaded, step, said), same = results[0], run[0] == other_run[0]
        assert step == DONE and loaded["rate"] == state["rate"], reader
        for kind in ("weights", "moments"):
            assert loaded[kind].keys() == state[kind].keys()
            assert [name for name, value in state[kind].items() if not torch.equal(loaded[kind][name], value)] == []
        assert [sample for _, sample in others] == [sample for _, sample in told[DONE:]], reader
        assert [loss for loss, _ in others] == pytest.approx([loss for loss, _ in told[DONE:]], rel=1e-6), reader
        assert all(result[3] == [] for result in results[1:]) and len(said) == (0 if same else 1), (reader, said)


def test_one_file_goes_to_tensor_ranks_and_back(gloo: Pools, tmp_path: Path) -> None:
    """Its parameters are cut twice there, in strides, and must come together again."""
    ranks, *run = PLACES["context 2 x tensor 2"]
    for writer, reader in (((ranks, run), (1, [Degrees(), "replicate"])), ((1, [Degrees(), "fsdp"]), (ranks, run))):
        path = tmp_path / f"{writer[0]}.ckpt"
        told, state, _, _ = gloo(writer[0]).run(train, *writer[1], path, False, True)[0]
        others, loaded, _, _ = gloo(reader[0]).run(train, *reader[1], path, True)[0]
        assert path.is_file()
        for kind in ("weights", "moments"):
            assert [name for name, value in state[kind].items() if not torch.equal(loaded[kind][name], value)] == []
        assert [loss for loss, _ in others] == pytest.approx([loss for loss, _ in told[DONE:]], rel=1e-6)
