"""Every module against its formula in float64: values and gradients of inputs and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_longctx.models import (
    MLP,
    Attention,
    Block,
    Decoder,
    DecoderConfig,
    RMSNorm,
    RopeScaling,
    rotary_angles,
)
from lightning_longctx.sequence.record import SequenceRecord

from . import reference

TINY = DecoderConfig(vocab_size=32, width=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=24)
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [90, 91, 92, 1000, 1001, 1002, 70000]])
Weights = dict[str, Tensor]


def random_weights(module: nn.Module) -> Weights:
    torch.manual_seed(3)
    return {
        name: (torch.randn(value.shape, dtype=torch.float64) / 2).requires_grad_()
        for name, value in module.named_parameters()
    }


def assert_same(
    module: nn.Module, formula: Callable[[Tensor, Weights], Tensor], states: Tensor, *arguments: object
) -> None:
    weights = random_weights(module)
    leaves = list(weights.values()) + ([states.requires_grad_()] if states.is_floating_point() else [])
    got = functional_call(module, weights, (states, *arguments))
    expected = formula(states, weights)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def random_states() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 7, 16, dtype=torch.float64)


def angles(config: DecoderConfig = TINY) -> tuple[Tensor, Tensor]:
    return rotary_angles(POSITIONS, config.head_size, config.rope_base, torch.float64, config.rope_scaling)


def test_rms_norm() -> None:
    assert_same(RMSNorm(16, 1e-3), lambda x, w: reference.rms_norm(x, w["weight"], 1e-3), random_states())


def test_mlp() -> None:
    assert_same(MLP(TINY), reference.mlp, random_states())


@pytest.mark.parametrize(("num_kv_heads", "head_width"), [(None, None), (2, None), (1, 6)])
def test_attention(num_kv_heads: int | None, head_width: int | None) -> None:
    config = DecoderConfig(width=16, num_heads=4, num_kv_heads=num_kv_heads, head_width=head_width, rope_base=500.0)
    formula = lambda x, w: reference.attention(x, w, POSITIONS, config)  # noqa: E731
    assert_same(Attention(config), formula, random_states(), angles(config))


@pytest.mark.parametrize(
    "more",
    [
        {"qk_norm": True},
        {"softcap": 0.7},
        {"qk_norm": True, "softcap": 2.0, "sinks": True},
        {"rope_scaling": RopeScaling("linear", 4.0)},
        {"rope_scaling": RopeScaling("dynamic", 2.0, 500)},
        {"rope_scaling": RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)},
        {"rope_scaling": RopeScaling("yarn", 4.0, 4000)},
    ],
    ids=lambda more: " ".join(str(getattr(value, "rope_type", name)) for name, value in more.items()),
)
def test_attention_with_options(more: dict[str, Any]) -> None:
    config = DecoderConfig(width=16, num_heads=2, num_kv_heads=1, rope_base=500.0, **more)
    formula = lambda x, w: reference.attention(x, w, POSITIONS, config)  # noqa: E731
    assert_same(Attention(config), formula, random_states(), angles(config))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_with_window_and_sinks(window: int | None, sinks: bool) -> None:
    config = DecoderConfig(width=16, num_heads=4, num_kv_heads=2, sinks=sinks)
    formula = lambda x, w: reference.attention(x, w, POSITIONS, config, window)  # noqa: E731
    assert_same(Attention(config, window), formula, random_states(), angles(config))


def test_block() -> None:
    assert_same(Block(TINY), lambda x, w: reference.block(x, w, POSITIONS, TINY), random_states(), angles())


MORE = [
    {},
    {"windows": (2, None), "sinks": True, "num_layers": 3},
    {"rope_scaling": RopeScaling("dynamic", 2.0, 500), "qk_norm": True, "softcap": 3.0},
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("more", MORE, ids=["plain", "mixed", "scaled"])
def test_decoder(tied: bool, more: dict[str, Any]) -> None:
    shape = dict(vocab_size=32, width=16, num_layers=2, num_heads=4, num_kv_heads=2, norm_eps=1e-4)
    config = DecoderConfig(**{**shape, "tie_embeddings": tied, **more})  # type: ignore[arg-type]
    input_ids = torch.randint(32, (2, 7))
    assert_same(Decoder(config), lambda x, w: reference.decoder(x, POSITIONS, w, config), input_ids, POSITIONS)


def test_logits_are_head_of_hidden_and_positions_count_from_zero() -> None:
    torch.manual_seed(0)
    model, input_ids = Decoder(TINY), torch.randint(32, (2, 7))
    positions = torch.arange(7).expand(2, 7)
    expected = model(input_ids, positions)
    torch.testing.assert_close(model(input_ids), expected, rtol=0, atol=0)
    torch.testing.assert_close(model(input_ids, None, SequenceRecord(length=7)), expected, rtol=0, atol=0)
    torch.testing.assert_close(model.logits(model.hidden(input_ids, positions)), expected, rtol=0, atol=0)
    assert model.hidden(input_ids, positions).shape == (2, 7, 16)


def test_missing_or_misshapen_positions_are_refused() -> None:
    model, input_ids = Decoder(TINY), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"position_ids=None.*2 ranks.*batch\['position_ids'\]"):
        model(input_ids, sequence=SequenceRecord(length=8, num_ranks=2))
    with pytest.raises(ValueError, match=r"position_ids of shape \(1, 8\) do not fit input_ids of shape \(1, 4\)"):
        model(input_ids, torch.arange(8)[None])


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_is_given_record_window_and_sinks(monkeypatch: pytest.MonkeyPatch, sinks: bool) -> None:
    seen = []

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append(((query.shape, key.shape, value.shape), options))
        return query

    monkeypatch.setattr("lightning_longctx.models.decoder.attend", spy)
    record = SequenceRecord(length=14, num_ranks=2, rank=1)
    model = Decoder(DecoderConfig(**{**vars(TINY), "num_layers": 3, "windows": (5, None), "sinks": sinks}))
    model(torch.zeros(2, 7, dtype=torch.int64), POSITIONS, record)
    assert [shapes for shapes, _ in seen] == [((2, 4, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4))] * 3
    for (_, options), window, block in zip(seen, (5, None, 5), model.blocks, strict=True):
        assert options.keys() == {"sequence", "window", "sinks", "softcap", "dropout_p", "num_heads"}
        assert (options["sequence"], options["window"]) == (record, window)
        assert (options["softcap"], options["dropout_p"]) == (None, 0.0)
        assert options["sinks"] is block.attention.sinks and (options["sinks"] is not None) == sinks


def test_softcap_and_dropout_reach_attention_the_latter_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append((options["softcap"], options["dropout_p"]))
        return query

    monkeypatch.setattr("lightning_longctx.models.decoder.attend", spy)
    model = Decoder(DecoderConfig(**{**vars(TINY), "softcap": 50.0, "attention_dropout": 0.25}))
    for training in (True, False):
        model.train(training)(torch.zeros(1, 4, dtype=torch.int64))
    assert seen == [(50.0, 0.25)] * 2 + [(50.0, 0.0)] * 2


def test_dropped_weights_change_training_and_leave_evaluation_alone() -> None:
    torch.manual_seed(0)
    plain, input_ids = Decoder(TINY), torch.randint(32, (2, 7))
    model = Decoder(DecoderConfig(**{**vars(TINY), "attention_dropout": 0.5}))
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model.eval()(input_ids), plain(input_ids), rtol=0, atol=0)
    assert not torch.allclose(model.train()(input_ids), plain(input_ids))


@pytest.mark.parametrize("mode", ["true", "mixed"])
def test_bfloat16_stays_near_float32(mode: str) -> None:
    torch.manual_seed(0)
    model, input_ids = Decoder(TINY), torch.randint(32, (2, 7))
    expected = model(input_ids, POSITIONS)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "mixed"):
        got = (model.bfloat16() if mode == "true" else model)(input_ids, POSITIONS)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() < 0.02 * expected.norm()


def test_number_of_parameters() -> None:
    per_block = 2 * 16 + 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24
    assert Decoder(TINY).num_parameters == 2 * 32 * 16 + 2 * per_block + 16
    tied = DecoderConfig(**{**vars(TINY), "tie_embeddings": True})
    assert Decoder(tied).num_parameters == 32 * 16 + 2 * per_block + 16
    normed = DecoderConfig(**{**vars(TINY), "qk_norm": True})
    assert Decoder(normed).num_parameters == 2 * 32 * 16 + 2 * (per_block + 2 * 4) + 16
    sinks = DecoderConfig(**{**vars(TINY), "sinks": True})
    assert Decoder(sinks).num_parameters == 2 * 32 * 16 + 2 * (per_block + 4) + 16
