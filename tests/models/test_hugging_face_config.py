"""config.json of the wild becomes a decoder or a refusal, and what a layout cannot hold is not written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_longctx.models import DecoderConfig, RopeScaling
from lightning_longctx.models.pretrained.config_json import decoder_config, hugging_face_config
from lightning_longctx.models.pretrained.names import INSIDE, OUTSIDE, expected_shapes, hugging_face_name

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(file: dict[str, Any], **changes: Any) -> DecoderConfig:
    changed = {**file, **changes}
    return decoder_config({key: value for key, value in changed.items() if value != "left out"}, "config.json")


def test_files_of_transformers_4() -> None:
    assert read(SMOLLM2) == DecoderConfig(
        49152, 576, 30, 9, 3, None, 1536, 100000.0, tie_embeddings=True, max_positions=8192
    )
    scaling = RopeScaling("llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert read(LLAMA3) == DecoderConfig(128256, 2048, 16, 32, 8, 64, 8192, 5e5, scaling, max_positions=131072)
    assert read(QWEN3) == DecoderConfig(
        151936,
        1024,
        28,
        16,
        8,
        128,
        3072,
        1e6,
        RopeScaling("yarn", 4.0, 32768),
        1e-6,
        qk_norm=True,
        tie_embeddings=True,
        max_positions=40960,
    )


@pytest.mark.parametrize("file", [SMOLLM2, LLAMA3, QWEN3])
def test_the_same_file_as_transformers_writes_it(file: dict[str, Any]) -> None:
    """Names, defaults and places of rotary parameters are those of transformers, whatever its version is."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**file).to_dict()
    assert decoder_config(theirs, "config.json") == read(file, head_dim=theirs["head_dim"])
    longest = 131072 if file is QWEN3 else None
    ours = hugging_face_config(read(file), torch.bfloat16, longest)
    again = transformers.AutoConfig.for_model(**ours).to_dict()
    varying = {"bos_token_id", "eos_token_id", "max_position_embeddings", "sliding_window", "max_window_layers"}
    for key in theirs.keys() - varying - {"dtype", "architectures", "is_llama_config", "rope_interleaved"}:
        assert again[key] == theirs[key], key


@pytest.mark.parametrize("scaling", [None, RopeScaling("linear", 2.0), RopeScaling("yarn", 4.0, 2048, beta_slow=2.0)])
@pytest.mark.parametrize("kept", ["rope_scaling", "rope_parameters"])
def test_either_form_of_rotary_parameters_is_enough(scaling: RopeScaling | None, kept: str) -> None:
    config = DecoderConfig(rope_base=5e4, rope_scaling=scaling, max_positions=8192)
    written = hugging_face_config(config, torch.float32)
    dropped = ["rope_parameters"] if kept == "rope_scaling" else ["rope_scaling", "rope_theta"]
    one_form = {key: value for key, value in written.items() if key not in dropped}
    for file in (written, one_form):
        found = decoder_config(file, "config.json")
        assert (found.rope_base, found.rope_scaling) == (5e4, scaling)


def test_what_a_file_leaves_out_is_as_in_transformers() -> None:
    assert read(SMOLLM2, rope_theta="left out").rope_base == 10000.0
    assert read(SMOLLM2, num_key_value_heads="left out").kv_heads == 9
    assert read(SMOLLM2, max_position_embeddings="left out").max_positions == 2048
    assert read(SMOLLM2, rms_norm_eps="left out").norm_eps == 1e-6
    assert read(QWEN3, head_dim="left out").head_size == 128
    yarn = {"type": "yarn", "factor": 4, "attention_factor": None}
    assert read(SMOLLM2, rope_scaling=yarn).rope_scaling == RopeScaling("yarn", 4, 8192)
    assert read(SMOLLM2, rope_scaling=yarn, original_max_position_embeddings=64).rope_scaling == RopeScaling(
        "yarn", 4, 64
    )
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert read(SMOLLM2, rope_scaling=dynamic).rope_scaling == RopeScaling("dynamic", 2.0, 8192)
    assert read(SMOLLM2, attention_dropout=0.1).attention_dropout == 0.1


def test_windows() -> None:
    windowed = dict(use_sliding_window=True, sliding_window=512)
    assert read(QWEN3, **windowed).windows == (None,)
    assert read(QWEN3, **windowed, max_window_layers=26).layer_windows == (None,) * 26 + (512, 512)
    assert read(QWEN3, **windowed, max_window_layers=0).windows == (512,)
    kinds = ["sliding_attention", "full_attention"] * 14
    assert read(QWEN3, **windowed, layer_types=kinds).windows == (512, None)
    assert read(QWEN3, sliding_window=512, max_window_layers=0).windows == (None,)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (SMOLLM2, {"model_type": "gemma2"}, "config.json: model_type='gemma2' cannot be read; llama and qwen3 can"),
        (SMOLLM2, {"hidden_size": "left out"}, "hidden_size is missing"),
        (SMOLLM2, {"attention_bias": True}, "attention_bias=True cannot be honoured"),
        (SMOLLM2, {"mlp_bias": True}, "mlp_bias=True"),
        (SMOLLM2, {"hidden_act": "gelu"}, "hidden_act='gelu' cannot be honoured: the decoder has hidden_act='silu'"),
        (SMOLLM2, {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        (SMOLLM2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (SMOLLM2, {"num_key_value_heads": 2}, "config.json: num_kv_heads=2 does not divide"),
        (
            LLAMA3,
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope_type='longrope' cannot be honoured; linear",
        ),
        (LLAMA3, {"rope_scaling": {"rope_type": "yarn"}}, "rope_type=yarn needs factor"),
        (LLAMA3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section="),
        (LLAMA3, {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor means nothing to.*default"),
        (LLAMA3, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters differ from"),
        (SMOLLM2, {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters differ from rope_scaling and rope_theta"),
        (
            SMOLLM2,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}},
            "2048 differs from max_position_embeddings=8192, by which rope_type=dynamic goes",
        ),
        (QWEN3, {"layer_types": ["full_attention"]}, "must be 28 entries"),
        (QWEN3, {"layer_types": ["chunked_attention"] * 28}, "of full_attention or sliding_attention"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 28}, "use_sliding_window or sliding_window is not set"),
    ],
)
def test_what_the_decoder_cannot_be_is_named(file: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(file, **changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": True}, "sinks=true has no place in the layout of LlamaForCausalLM"),
        ({"sinks": True, "qk_norm": True}, "sinks=true has no place in the layout of Qwen3ForCausalLM"),
        ({"softcap": 30.0}, "softcap=30.0 has no place"),
        ({"windows": (8, None)}, r"windows=\[8, None\] without qk_norm has no place"),
        ({"windows": (8, 4), "qk_norm": True}, r"windows=\[8, 4\], more than one size, has no place"),
        ({"width": 60, "num_heads": 8, "head_width": 8}, "num_heads=8, which does not divide width=60, has no place"),
        ({"max_positions": None}, "known from nowhere: set max_position_embeddings"),
        ({"rope_scaling": RopeScaling("dynamic", 2.0, 32)}, "would change rotary scaling.*=dynamic take it to be 32"),
        ({"rope_scaling": RopeScaling("yarn", 2.0, 32)}, "Set max_position_embeddings=64"),
    ],
)
def test_what_a_layout_cannot_hold_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hugging_face_config(DecoderConfig(**{"max_positions": 4096, **options}), torch.float32)


def test_the_longest_sequence_may_be_said_or_follow() -> None:
    written = hugging_face_config(DecoderConfig(max_positions=4096), torch.float32, 512)
    assert written["max_position_embeddings"] == 512
    llama3 = RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    for scaling, longest in ((llama3, 512), (RopeScaling("yarn", 4.0, 64), 256), (RopeScaling("dynamic", 4.0, 64), 64)):
        written = hugging_face_config(DecoderConfig(rope_scaling=scaling), torch.float32)
        assert written["max_position_embeddings"] == longest
    with pytest.raises(ValueError, match="max_position_embeddings=0 must be a positive integer"):
        hugging_face_config(DecoderConfig(), torch.float32, 0)


def test_the_table_of_names_is_one_to_one_and_complete() -> None:
    ours = expected_shapes(DecoderConfig(num_layers=2, qk_norm=True))
    theirs = [hugging_face_name(name) for name in ours]
    assert len(set(theirs)) == len(ours) == len(OUTSIDE) + 2 * len(INSIDE)
    for wrong in ("blocks.0.attention.sinks", "blocks.x.mlp.up.weight", "head.bias", "blocks.0"):
        with pytest.raises(ValueError, match=f"tensor '{wrong}' has no place"):
            hugging_face_name(wrong)
