"""Scaled rotary positions: bit for bit the numbers of transformers, by the length of whole rows, and strict options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_longctx.batch import Sharding, shard_batch
from lightning_longctx.models import Decoder, DecoderConfig, RopeScaling, rotary_angles, rotary_frequencies
from lightning_longctx.models.rope_scaling import stretched_base
from lightning_longctx.sequence.record import SequenceRecord

from . import reference

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}
YARN = [
    {},
    {"original_max_position_embeddings": 32768},
    {"factor": 40.0, "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 4096},
    {"attention_factor": 1.25},
    {"mscale": 0.707, "mscale_all_dim": 1.0, "factor": 40.0},
    {"truncate": False, "original_max_position_embeddings": 4096},
    {"factor": 1.0},
    {"original_max_position_embeddings": 4},
    {"beta_fast": 1.0, "original_max_position_embeddings": 1024},
]


def frequencies(scaling: RopeScaling | None, width: int = 64, base: float = 1e4, length: int = 0, **kind: Any) -> Any:
    dtype = kind.get("dtype", torch.float32)
    return rotary_frequencies(width, base, device=CPU, dtype=dtype, scaling=scaling, length=length)


def theirs(scaling: RopeScaling, width: int, base: float, length: int) -> tuple[torch.Tensor, float]:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = scaling.original_max_position_embeddings or 32
    parameters = {"rope_type": scaling.rope_type, "rope_theta": base, **scaling.given}
    longest = original if scaling.rope_type == "dynamic" else round(original * scaling.factor) + 1
    config = transformers.LlamaConfig(
        hidden_size=2 * width, num_attention_heads=2, max_position_embeddings=longest, rope_parameters=parameters
    )
    return ROPE_INIT_FUNCTIONS[scaling.rope_type](config, CPU, seq_len=length)


@pytest.mark.parametrize(("width", "base"), [(64, 1e4), (128, 5e5), (6, 1e6)])
@pytest.mark.parametrize(
    ("kind", "more"), [(kind, {}) for kind in KINDS if kind != "yarn"] + [("yarn", more) for more in YARN]
)
def test_frequencies_and_factor_are_those_of_transformers(kind: Any, more: Any, width: int, base: float) -> None:
    scaling = RopeScaling(kind, **{**KINDS[kind], **more})
    for length in (1, 32, 33, 128, 100_000):
        expected, factor = theirs(scaling, width, base, length)
        assert torch.equal(frequencies(scaling, width, base, length), expected)
        assert scaling.attention_scale == factor


@pytest.mark.parametrize("kind", list(KINDS))
def test_float64_frequencies_are_the_formula(kind: Any) -> None:
    scaling = RopeScaling(kind, **KINDS[kind])
    expected = [reference.frequency(pair, 32, 1e4, scaling, 128) for pair in range(32)]
    got = frequencies(scaling, length=128, dtype=torch.float64)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_base_of_dynamic_scaling() -> None:
    scaling = RopeScaling("dynamic", 2.0, 32)
    assert stretched_base(scaling, 1e4, 64, 128) == pytest.approx(74534.8, abs=0.05)
    assert [stretched_base(scaling, 1e4, 64, length) for length in (1, 32)] == [1e4, 1e4]


def test_angles_carry_the_factor_of_yarn() -> None:
    positions = torch.tensor([[0, 5]])
    scaling = RopeScaling("yarn", 4.0, 32)
    assert scaling.attention_scale == pytest.approx(1.13863, abs=5e-6)
    cosine, sine = rotary_angles(positions, 64, 1e4, scaling=scaling)
    torch.testing.assert_close(cosine.square() + sine.square(), torch.full_like(cosine, 1.13863**2), rtol=1e-5, atol=0)
    assert (cosine[0, 0, 0] == torch.tensor(scaling.attention_scale)).all()


def test_every_row_goes_by_its_own_length() -> None:
    scaling = RopeScaling("dynamic", 2.0, 32)
    positions = torch.stack([torch.arange(128), torch.cat([torch.arange(64), torch.arange(64)])])
    cosine, _ = rotary_angles(positions, 64, 1e4, scaling=scaling)
    for row, length in enumerate((128, 64)):
        alone, _ = rotary_angles(positions[row : row + 1, ::3], 64, 1e4, scaling=scaling, row_lengths=(length,))
        torch.testing.assert_close(cosine[row : row + 1, :, ::3], alone, rtol=0, atol=0)


def rows() -> dict[str, torch.Tensor]:
    """A whole row, a padded one, a packed one, and a part of a document."""
    ids = torch.randint(32, (4, 50), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 50, dtype=torch.int64)
    mask[1, 20:] = 0
    positions = torch.arange(50).repeat(4, 1)
    positions[2, 38:] -= 38
    positions[3] += 100
    return {"input_ids": ids, "labels": ids, "attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize("multiple", [1, 16])
def test_padding_and_companions_leave_a_row_alone(multiple: int) -> None:
    """Neither the padding that degrees ask for, nor other rows of the batch, change a token's angles."""
    torch.manual_seed(0)
    scaling = RopeScaling("dynamic", 2.0, 8)
    model = Decoder(DecoderConfig(32, 16, num_layers=1, num_heads=2, rope_scaling=scaling)).double()
    batch = shard_batch(rows(), Sharding(multiple=multiple))
    assert batch["sequence"].row_lengths == (50, 20, 38, 150)
    logits = model(batch["input_ids"], batch["position_ids"], batch["sequence"])
    for row, size in enumerate((50, 20, 50, 50)):
        alone = {key: value[row : row + 1, :size] for key, value in rows().items()}
        alone = shard_batch(alone, Sharding())
        assert len(alone["sequence"].row_lengths) == 1
        expected = model(alone["input_ids"], alone["position_ids"], alone["sequence"])
        torch.testing.assert_close(logits[row : row + 1, :size], expected, rtol=1e-12, atol=1e-12)
        unrecorded = model(alone["input_ids"], alone["position_ids"])
        if row != 2:  # without a record, documents would see each other
            torch.testing.assert_close(unrecorded, expected, rtol=0, atol=0)


def test_rows_that_agree_are_recorded_once() -> None:
    ids = torch.zeros(3, 13, dtype=torch.int64)
    assert shard_batch({"input_ids": ids}, Sharding(multiple=8))["sequence"].row_lengths == (13,)
    positions = torch.arange(13).expand(3, 3, 13)
    assert shard_batch({"input_ids": ids, "position_ids": positions}, Sharding())["sequence"].row_lengths == ()


def test_lengths_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="row_lengths of 2 rows do not fit position_ids of 1"):
        rotary_angles(torch.arange(4)[None], 8, 1e4, scaling=RopeScaling("dynamic", 2.0, 8), row_lengths=(50, 20))


@pytest.mark.parametrize("cut", [{"num_ranks": 2}, {"head": 2}])
def test_a_shard_without_lengths_is_refused(cut: dict[str, int]) -> None:
    ids, positions = torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None]
    model = Decoder(DecoderConfig(32, 16, num_layers=1, num_heads=2, rope_scaling=RopeScaling("dynamic", 2.0, 8)))
    with pytest.raises(ValueError, match="dynamic goes by the length of whole rows.*ShardCollate"):
        model(ids, positions, SequenceRecord(8, **cut))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "rope_type='ntk' is unknown; choose one of linear, dynamic"),
        ({"rope_type": "yarn", "factor": 2.0}, "rope_type=yarn needs original_max_position_embeddings"),
        ({"rope_type": "llama3", **KINDS["yarn"]}, "llama3 needs low_freq_factor and high_freq_factor"),
        ({"rope_type": "linear", **KINDS["yarn"]}, "original_max_position_embeddings=32 means nothing to.*linear"),
        (
            {"rope_type": "dynamic", **KINDS["yarn"], "beta_fast": 2.0},
            "beta_fast=2.0 means nothing to.*dynamic",
        ),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5 must be a number of at least 1"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan"),
        ({"rope_type": "linear", "factor": "4"}, "factor='4'"),
        ({"rope_type": "yarn", **KINDS["yarn"], "truncate": 1}, "truncate=1 must be a boolean"),
        ({"rope_type": "yarn", **KINDS["yarn"], "beta_slow": 0.0}, "beta_slow=0.0 must be a positive number"),
        ({"rope_type": "yarn", **KINDS["yarn"], "beta_slow": 64.0}, "beta_fast=32 must not be smaller.*beta_slow=64"),
        ({"rope_type": "yarn", **KINDS["yarn"], "mscale": 1.0}, "mscale would go unused.*Give both or none"),
        (
            {"rope_type": "yarn", **KINDS["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
            "mscale and mscale_all_dim would go unused",
        ),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32.0},
            "original_max_position_embeddings=32.0 must be a positive integer",
        ),
        (
            {"rope_type": "llama3", **KINDS["llama3"], "high_freq_factor": 1.0},
            "high_freq_factor=1.0 must be larger than low_freq_factor=1.0",
        ),
    ],
)
def test_parameters_are_needed_or_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**options)


def test_recipes_can_write_it() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--decoder", type=DecoderConfig)
    text = "{rope_scaling: {rope_type: yarn, factor: 4, original_max_position_embeddings: 32}}"
    found = parser.instantiate_classes(parser.parse_args([f"--decoder={text}"])).decoder
    assert found == DecoderConfig(rope_scaling=RopeScaling("yarn", 4.0, 32))
    with pytest.raises(Exception, match="beta_quick"):
        parser.parse_args(["--decoder={rope_scaling: {rope_type: yarn, factor: 4, beta_quick: 1}}"])
