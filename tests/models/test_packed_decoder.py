"""Packed documents through the decoder against every document alone: values and gradients, float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.func import functional_call

from lightning_longctx.batch import Sharding, shard_batch
from lightning_longctx.loss import token_cross_entropy
from lightning_longctx.models import Decoder, DecoderConfig, RopeScaling
from lightning_longctx.sequence.documents import document_positions

from . import reference

ROWS = {
    "alike": [(0, 1, 4, 12), (0, 1, 4, 12)],
    "unlike": [(0, 5, 12), (0, 1, 2, 12)],
    "one document": [(0, 12), (0, 12)],
}


SCALING = RopeScaling("yarn", 4.0, 16)


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("windows", [(None,), (3, None)])
@pytest.mark.parametrize("more", [{}, {"sinks": True}, {"qk_norm": True, "rope_scaling": SCALING, "softcap": 2.0}])
def test_packed_equals_every_document_alone(rows: str, windows: tuple[int | None, ...], more: dict[str, Any]) -> None:
    config = DecoderConfig(32, 16, num_layers=2, num_heads=4, num_kv_heads=2, windows=windows, **more)
    torch.manual_seed(0)
    model = Decoder(config)
    weights = {name: torch.randn_like(value, dtype=torch.float64) / 2 for name, value in model.named_parameters()}
    weights = {name: value.requires_grad_() for name, value in weights.items()}
    ids = torch.randint(32, (2, 12))
    lengths = [[stop - start for start, stop in pairwise(ends)] for ends in ROWS[rows]]
    positions = torch.stack([torch.from_numpy(document_positions(each)) for each in lengths])
    batch = shard_batch({"input_ids": ids, "labels": ids, "position_ids": positions}, Sharding())
    logits = functional_call(model, weights, (batch["input_ids"], batch["position_ids"], batch["sequence"]))
    total, count = token_cross_entropy(logits, batch["shift_labels"])

    expected = torch.zeros((), dtype=torch.float64)
    predicted = 0
    for row, ends in enumerate(ROWS[rows]):
        for start, stop in pairwise(ends):
            document = ids[row : row + 1, start:stop]
            alone = reference.decoder(document, torch.arange(stop - start)[None], weights, config)
            torch.testing.assert_close(logits[row : row + 1, start:stop], alone, rtol=1e-10, atol=1e-10)
            log_probabilities = alone.log_softmax(-1)[:, :-1]
            expected = expected - log_probabilities.gather(-1, document[:, 1:, None]).sum()
            predicted += stop - start - 1
    assert int(count) == predicted == batch["sequence"].num_valid_tokens
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    leaves = list(weights.values())
    got = torch.autograd.grad(logits.square().sum(), leaves)
    alone_logits = [
        reference.decoder(ids[row : row + 1, start:stop], torch.arange(stop - start)[None], weights, config)
        for row, ends in enumerate(ROWS[rows])
        for start, stop in pairwise(ends)
    ]
    for one, other in zip(
        got, torch.autograd.grad(sum(logits.square().sum() for logits in alone_logits), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
