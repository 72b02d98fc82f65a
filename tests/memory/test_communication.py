"""What policies cost in attention calls and messages, over ranks and through the Trainer; and what ``auto`` leaves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, LongContextStrategy
from lightning_longctx.attention.op import rings_run
from lightning_longctx.attention.rings import find_ring
from lightning_longctx.memory.policy import Checkpointing
from lightning_longctx.models import DecoderConfig

LAYERS = 3


class Costs(Callback):
    """Attention's forward passes and sent bytes of every step on this rank."""

    def __init__(self):
        self.steps, self.before = [], (0, Counter())

    def on_train_batch_start(self, trainer, module, batch, index):
        self.before = (rings_run(), Counter(find_ring(batch["sequence"].ring).sent_bytes))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        sent = Counter(find_ring(batch["sequence"].ring).sent_bytes)
        self.steps.append((rings_run() - self.before[0], sent - self.before[1]))


def fit(options, degrees, folder=None, steps=1):
    costs = Costs()
    tokens = torch.randint(64, (steps * 2, 96), generator=torch.Generator().manual_seed(0))
    module = CausalLM(DecoderConfig(vocab_size=64, width=32, num_layers=LAYERS, num_heads=4, num_kv_heads=2))
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=LongContextStrategy(Degrees(**degrees), "zigzag", checkpointing=options),
        max_steps=steps,
        callbacks=[costs, *([ModelCheckpoint(folder, save_last=True)] if folder else [])],
        logger=TensorBoardLogger(folder, name=None) if folder else False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    trainer.fit(module, DataLoader(samples, batch_size=1))
    return costs.steps


def fit_all(policies, degrees):
    return [fit(policy, degrees)[0] for policy in policies]


@pytest.mark.parametrize("degrees", [dict(context=4, inner_ring=2), dict(context=2, head=2)], ids=str)
def test_selective_sends_and_attends_as_often_as_none(gloo, degrees):
    policies = [Checkpointing(), Checkpointing("selective"), Checkpointing("full")]
    for none, selective, full in gloo(4).run(fit_all, policies, degrees, timeout=120):
        assert (none[0], selective[0], full[0]) == (LAYERS, LAYERS, 2 * LAYERS)
        assert selective[1] == none[1]
        assert full[1].total() > none[1].total()


def test_auto_prints_logs_and_saves_its_plan(gloo, tmp_path):
    options = Checkpointing("auto", budget_gib=1.0)
    found = gloo(4).run(fit, options, dict(context=4), str(tmp_path), 4, timeout=120)
    assert [calls for calls, _ in found[0]] == [2 * LAYERS, 2 * LAYERS, LAYERS, LAYERS]  # full twice, then the plan
    plan = json.loads((tmp_path / "memory_plan.json").read_text())
    assert plan["plan"]["blocks"] == [{"checkpointed": False, "keep": [], "offload": []}] * LAYERS
    assert "| decoder.blocks.0 to decoder.blocks.2 | everything |" in "\n".join(plan["table"])
    [events] = Path(tmp_path).rglob("events.*")
    accumulator = EventAccumulator(str(events)).Reload()
    text = accumulator.Tensors("memory_plan/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "A step under this plan took" in text and "| none |" in text


def fit_with_too_little(_):
    with pytest.raises(ValueError, match="budget_gib=1e-05 is too little") as caught:
        fit(Checkpointing("auto", budget_gib=1e-5), dict(context=4), steps=3)
    return str(caught.value)


def test_a_budget_that_nothing_fits_is_the_same_error_on_every_rank(gloo):
    assert len(set(gloo(4).run(fit_with_too_little, 0, timeout=120))) == 1
