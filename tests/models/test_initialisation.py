"""The documented start, in place and by way of the meta device."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from lightning.fabric.utilities.init import _materialize_distributed_module

from lightning_longctx.models import Decoder, DecoderConfig

WIDE = DecoderConfig(vocab_size=500, width=128, num_layers=8, num_heads=4, num_kv_heads=2, mlp_width=256)


def test_weights_start_with_documented_deviations() -> None:
    torch.manual_seed(0)
    for name, value in Decoder(WIDE).named_parameters():
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
            continue
        residual = name.endswith(("output.weight", "down.weight"))
        expected = 0.02 / math.sqrt(16) if residual else 0.02
        assert value.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(value.mean().item()) < 0.05 * expected, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("way", ["own", "lightning"])
def test_meta_device_gives_the_same_start(way: str, sinks: bool, tied: bool) -> None:
    config = DecoderConfig(**{**vars(WIDE), "num_layers": 2, "tie_embeddings": tied, "sinks": sinks, "qk_norm": sinks})
    torch.manual_seed(5)
    expected = Decoder(config)
    with torch.device("meta"):
        model = Decoder(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(5)
    if way == "own":
        model.to_empty(device="cpu").reset_parameters()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Lightning only warns of modules it cannot initialise
            _materialize_distributed_module(model, torch.device("cpu"))
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    input_ids, position_ids = torch.randint(500, (1, 9)), torch.arange(50, 59)[None]
    torch.testing.assert_close(model(input_ids, position_ids), expected(input_ids, position_ids), rtol=0, atol=0)


def test_sinks_start_at_zero_and_leave_the_other_draws_alone() -> None:
    torch.manual_seed(1)
    plain = Decoder(WIDE).state_dict()
    torch.manual_seed(1)
    model = Decoder(DecoderConfig(**{**vars(WIDE), "sinks": True}))
    with torch.no_grad():
        model.blocks[0].attention.sinks.fill_(3.0)
    torch.manual_seed(1)
    model.reset_parameters()
    state = model.state_dict()
    sinks = {name: state.pop(name) for name in list(state) if name.endswith("attention.sinks")}
    assert len(sinks) == WIDE.num_layers and all(value.tolist() == [0.0] * 4 for value in sinks.values())
    torch.testing.assert_close(state, plain, rtol=0, atol=0)


def test_no_buffer_can_be_lost_or_rounded() -> None:
    assert list(Decoder(WIDE).buffers()) == []


def test_tied_weights_stay_tied_through_meta_training_and_reload() -> None:
    config = DecoderConfig(vocab_size=32, width=16, num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=True)
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu").reset_parameters()
    input_ids = torch.randint(32, (1, 9))

    def step(model: Decoder) -> float:
        model.zero_grad()
        logits = model(input_ids)[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, input_ids[0, 1:])
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return loss.item()

    first = step(model)
    reloaded = Decoder(config)
    reloaded.load_state_dict(model.state_dict())
    assert "head.weight" not in model.state_dict()
    assert step(reloaded) == step(model) < first
