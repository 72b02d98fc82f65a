"""Rotary frequencies are scaled by the length of the whole sequence, on every rank, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees
from lightning_longctx.batch import Sharding, shard_batch
from lightning_longctx.models import Decoder, DecoderConfig, RopeScaling
from lightning_longctx.models.rope_scaling import stretched_base
from lightning_longctx.sequence import SequenceRecord
from tests.cases.tiny import SGD, assert_equal_numbers, make_trainer

LENGTH, ORIGINAL, BASE, WIDTH = 128, 32, 1e4, 64
SCALINGS = {"dynamic": RopeScaling("dynamic", 2.0, ORIGINAL), "yarn": RopeScaling("yarn", 4.0, ORIGINAL)}
BATCHES = ("whole", "original", "uneven", "packed")


class Logits(CausalLM):
    """Keeps the logits of its steps, and which places in a row they belong to."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        logits = super().forward(batch)
        held = torch.tensor([position for piece in batch["sequence"].ranges for position in piece])
        self.seen = [*getattr(self, "seen", []), (held, logits.detach(), batch["sequence"].row_lengths)]
        return logits

    def predict_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self(batch)


def module(kind: str) -> Logits:
    torch.manual_seed(0)
    return Logits(config(kind), optimizer=SGD)


def config(kind: str) -> DecoderConfig:
    return DecoderConfig(32, 16, 1, 2, 1, WIDTH, rope_base=BASE, rope_scaling=SCALINGS[kind])


def batch_of(name: str) -> dict[str, Tensor]:
    """Two rows: whole ones, as short as in pretraining, of a length that does not divide with padding, or packed."""
    length = {"original": ORIGINAL, "uneven": 109}.get(name, LENGTH)
    ids = torch.randint(32, (2, length), generator=torch.Generator().manual_seed(length))
    batch = {"input_ids": ids, "labels": ids}
    if name == "uneven":
        mask = torch.ones_like(ids)
        mask[1, 70:] = 0
        return {**batch, "attention_mask": mask}
    if name == "packed":
        positions = torch.cat([torch.arange(75), torch.arange(53)])
        return {**batch, "position_ids": positions.expand(2, LENGTH)}
    return batch


def steps(degrees: Degrees, layout: str) -> dict[tuple[str, str, str], Any]:
    """The logits of this rank, by scaling, batch and kind of step."""
    found = {}
    for kind in SCALINGS:
        evaluated = module(kind)
        loader = DataLoader([batch_of(name) for name in BATCHES], batch_size=None)  # type: ignore[arg-type]
        make_trainer(degrees, layout).predict(evaluated, loader)
        found |= {(kind, name, "eval"): seen for name, seen in zip(BATCHES, evaluated.seen, strict=True)}
        trained = module(kind)
        loader = DataLoader([batch_of("uneven")], batch_size=None)  # type: ignore[arg-type]
        make_trainer(degrees, layout).fit(trained, loader)
        found[kind, "uneven", "train"] = trained.seen[0]
    return found


def expected(kind: str, name: str) -> Tensor:
    decoder = module(kind)
    decoder.configure_model()
    batch = shard_batch(batch_of(name), Sharding())
    with torch.no_grad():
        return decoder.double().decoder(batch["input_ids"], batch["position_ids"], batch["sequence"])


LENGTHS = {"whole": (128,), "original": (32,), "uneven": (109, 70), "packed": (75,)}


@pytest.mark.parametrize(
    ("degrees", "layout"),
    [
        (Degrees(context=4), "zigzag"),
        (Degrees(context=2, head=2), "zigzag"),
        (Degrees(context=4, inner_ring=2), "document_zigzag"),
    ],
)
def test_logits_are_those_of_one_process(gloo: Any, degrees: Degrees, layout: str) -> None:
    """B24: train and eval logits under dynamic and YaRN scaling, where shards are as short as pretraining was."""
    by_rank = gloo(4).run(steps, degrees, layout)
    for kind, name, step in by_rank[0]:
        shards = [rank[kind, name, step] for rank in by_rank]
        assert {lengths for _, _, lengths in shards} == {LENGTHS[name]}
        places = torch.cat([held for held, _, _ in shards])
        right = expected(kind, name)
        order = places.argsort()[: right.shape[1]]
        assert places[order].tolist() == list(range(right.shape[1]))
        logits = torch.cat([logits for _, logits, _ in shards], dim=1)[:, order]
        assert_equal_numbers({"logits": logits}, {"logits": right})


def test_the_numbers_of_the_case() -> None:
    """B24: the base on every rank, and YaRN's factor whether or not the sequence is longer than in pretraining."""
    for rank in range(4):
        shard = shard_batch(batch_of("whole"), Sharding("zigzag", num_ranks=4, rank=rank))
        (length,) = shard["sequence"].row_lengths
        assert shard["input_ids"].shape[1] == ORIGINAL and length == LENGTH
        assert stretched_base(SCALINGS["dynamic"], BASE, WIDTH, length) == pytest.approx(74534.8, abs=0.05)
    assert SCALINGS["yarn"].attention_scale == pytest.approx(1.13863, abs=5e-6)


@pytest.mark.parametrize("kind", list(SCALINGS))
def test_a_model_that_scales_by_its_shard_is_noticed(kind: str) -> None:
    """B24: the check above would fail with the length of a shard, and with the factor left out."""
    torch.manual_seed(0)
    decoder = Decoder(config(kind)).double()
    ids = batch_of("whole")["input_ids"]
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    decoder.requires_grad_(False)
    right = decoder(ids, positions)
    if kind == "yarn":
        decoder.config = DecoderConfig(32, 16, 1, 2, 1, WIDTH, rope_base=BASE)
    wrong = decoder(ids, positions, SequenceRecord(LENGTH, row_lengths=(LENGTH // 4,)))
    with pytest.raises(AssertionError, match="logits differs"):
        assert_equal_numbers({"logits": wrong}, {"logits": right})
