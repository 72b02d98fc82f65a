"""Shapes of a decoder: defaults follow from each other, and what does not fit says what would."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from lightning_longctx.models import DecoderConfig, RopeScaling
from lightning_longctx.plan.mask import Mask


def test_defaults_follow_from_width_and_heads() -> None:
    config = DecoderConfig(width=96, num_heads=6)
    assert (config.kv_heads, config.head_size, config.mlp_size) == (6, 16, 256)
    config = DecoderConfig(width=96, num_heads=5, num_kv_heads=1, head_width=32, mlp_width=100)
    assert (config.kv_heads, config.head_size, config.mlp_size) == (1, 32, 100)


def test_mlp_width_of_a_large_model() -> None:
    assert DecoderConfig(width=4096, num_heads=32).mlp_size == 10944  # 10922.67 rounded up to a multiple of 64


def test_windows_are_cycled_over_the_layers() -> None:
    config = DecoderConfig(num_layers=3, windows=[8, None])  # type: ignore[arg-type]
    assert config.layer_windows == (8, None, 8)
    assert config.attention_masks == (Mask(window=8), Mask(), Mask(window=8))
    assert DecoderConfig(num_layers=2).attention_masks == (Mask(), Mask())
    assert hash(config) == hash(DecoderConfig(num_layers=3, windows=(8, None)))


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        DecoderConfig().width = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 8, "num_kv_heads": 3}, r"num_kv_heads=3 does not divide num_heads=8.*1 or 2 or 4 or 8"),
        ({"width": 100, "num_heads": 8}, "num_heads=8 does not divide width=100.*set head_width"),
        ({"head_width": 15}, "head_width=15 is odd.*head_width=16"),
        ({"width": 12, "num_heads": 4}, "head_width=3 is odd"),
        ({"num_layers": 0}, "num_layers=0 must be a positive integer"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"width": 64.0}, "width=64.0 must be a positive integer"),
        ({"num_heads": True}, "num_heads=True"),
        ({"mlp_width": 0}, "mlp_width=0 must be a positive integer or null"),
        ({"rope_base": 1.0}, "rope_base=1.0"),
        ({"rope_base": float("nan")}, "rope_base=nan"),
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
        ({"attention_dropout": 1.0}, "attention_dropout=1.0 must be at least 0 and less than 1"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
        ({"softcap": 0.0}, "softcap=0.0 must be a positive, finite number; null"),
        ({"softcap": float("inf")}, "softcap=inf"),
        ({"softcap": "50"}, "softcap='50' must be a positive, finite number"),
        ({"dropout": "0.1"}, "dropout='0.1' must be at least 0 and less than 1, as a number"),
        ({"attention_dropout": False}, "attention_dropout=False"),
        ({"rope_base": float("inf")}, "rope_base=inf must be a finite number"),
        ({"rope_base": "1e4"}, "rope_base='1e4'"),
        ({"norm_eps": float("inf")}, "norm_eps=inf must be a positive, finite number"),
        ({"norm_eps": None}, "norm_eps=None"),
        ({"sinks": "yes"}, "sinks='yes' must be true or false"),
        ({"qk_norm": 1}, "qk_norm=1 must be true or false"),
        ({"tie_embeddings": None}, "tie_embeddings=None must be true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be a RopeScaling, or null"),
        ({"windows": 8}, r"windows=8 must be a list, such as \[1024, null\]"),
        ({"max_positions": 0}, "max_positions=0 must be a positive integer or null"),
        ({"head_width": 2, "rope_scaling": RopeScaling("dynamic", 2.0, 32)}, "head_width=2 leaves nothing.*dynamic"),
        ({"windows": []}, r"windows=\[\] must be a list of positive integers or null"),
        ({"windows": [0]}, r"windows=\[0\]"),
        ({"windows": [True]}, r"windows=\[True\]"),
        ({"windows": [8, None], "num_layers": 1}, r"windows=\[8, None\].*one to num_layers=1 entries"),
    ],
)
def test_what_does_not_fit_names_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["width"], "the decoder's options are a list, but must be a mapping"),
        ({"widht": 8}, "the decoder has no option 'widht': correct its name.*Known are vocab_size, width"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be a mapping with rope_type and factor, or null"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling needs factor"),
        ({"rope_scaling": {"rope_type": [], "factor": 2.0}}, r"rope_type=\[\] is unknown; choose one of linear"),
        (
            {"rope_scaling": {"rope_type": "linear", "factr": 2.0}},
            "rope_scaling has no option 'factr'.*known are rope_",
        ),
    ],
)
def test_plain_values_that_are_no_shape_are_named(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_dict(options)
