"""GGUF files become our decoder: the same numbers as llama.cpp's formula, or a message that names what is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_longctx.models import Decoder
from lightning_longctx.models.pretrained.gguf import gguf_config, load_gguf, read_gguf
from tests.models import reference
from tests.models.tiny_gguf import CONFIG, interleaved, random_state, write_gguf

KINDS = gguf.GGMLQuantizationType


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_shape_arrive(tmp_path: Path, tied: bool) -> None:
    config = replace(CONFIG, tie_embeddings=tied)
    state = random_state(config)
    read, weights = load_gguf(write_gguf(tmp_path / "tiny.gguf", config, state))
    assert read == config
    assert weights.keys() == state.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, state[name]), name
    Decoder(read).load_state_dict(weights)


def turn_neighbours(x: Tensor, position_ids: Tensor, base: float, *unscaled: object) -> Tensor:
    """Rotary positions as llama.cpp has them for this architecture: pairs (0, 1), (2, 3), ..."""
    width = x.shape[-1]
    frequencies = torch.tensor([base ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), position_ids.double()[:, None, :, None] * frequencies)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def test_the_same_logits_as_by_the_formula_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the weights as they are stored, with neighbours turned: an order of heads that is not undone would show."""
    config, weights = load_gguf(write_gguf(tmp_path / "tiny.gguf"))
    model = Decoder(config).double()
    model.load_state_dict(weights)
    stored = {name: weight.double() for name, weight in random_state().items()}
    for name, heads in (("query", config.num_heads), ("key", config.kv_heads)):
        for layer in range(config.num_layers):
            key = f"blocks.{layer}.attention.{name}.weight"
            stored[key] = torch.from_numpy(interleaved(stored[key].numpy(), heads))
    monkeypatch.setattr(reference, "rotate", turn_neighbours)
    tokens = torch.randint(config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(24).expand(2, -1)
    expected = reference.decoder(tokens, positions, stored, config)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "error"), [(KINDS.F16, 1e-3), (KINDS.BF16, 4e-3), (KINDS.Q8_0, 0.01), (KINDS.Q4_1, 0.15)]
)
def test_narrow_weights_become_float32(tmp_path: Path, kind: KINDS, error: float) -> None:
    state = random_state()
    _, weights = load_gguf(write_gguf(tmp_path / "tiny.gguf", kind=kind))
    for name, weight in weights.items():
        assert weight.dtype == torch.float32 and weight.is_contiguous()
        assert (weight - state[name]).abs().max() <= error * state[name].abs().max(), name


def q4_1(block: np.ndarray) -> list[float]:
    """32 values of one block, by the description of the format: scale, minimum, then two values a byte."""
    scale, minimum = block[:4].view(np.float16).astype(np.float32)
    low, high = block[4:] & 15, block[4:] >> 4
    return [float(scale * value + minimum) for value in (*low, *high)]


def test_blocks_are_read_as_the_format_says(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", kind=KINDS.Q4_1))
    stored = np.asarray(file.tensors["blk.1.ffn_up.weight"][0])
    _, weights = load_gguf(file.path)
    for row, expected in zip(weights["blocks.1.mlp.up.weight"], stored, strict=True):
        assert row.tolist() == pytest.approx(q4_1(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "qwen3"}, "general.architecture='qwen3'"),
        ({"without": "llama.block_count"}, "llama.block_count is missing"),
        ({"without": "token_embd.weight"}, "token_embd.weight is missing"),
        ({"without": "blk.1.ffn_up.weight"}, "no tensor blk.1.ffn_up.weight"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, "tensor rope_freqs.weight"),
        ({"blk.0.attn_q.bias": np.ones(32, np.float32)}, "tensor blk.0.attn_q.bias"),
        ({"rope_scaling_type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"without": "llama.rope.dimension_count", "rope_dimension_count": 4}, "llama.rope.dimension.count=4"),
        ({"without": "llama.vocab_size", "vocab": 7}, "llama.vocab=7"),
    ],
)
def test_what_the_decoder_cannot_be_is_named(tmp_path: Path, change: dict, named: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(ValueError) as refused:
        load_gguf(path)
    assert named in str(refused.value) and str(path) in str(refused.value)


def test_sizes_that_disagree_are_refused(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf"))
    for key, value in (("rope.dimension_count", 4), ("attention.value_length", 16), ("vocab_size", 300)):
        wrong = replace(file, metadata={**file.metadata, f"llama.{key}": value})
        with pytest.raises(ValueError, match=f"llama.{key}={value}"):
            gguf_config(wrong)
    with pytest.raises(ValueError, match="num_kv_heads"):
        gguf_config(replace(file, metadata={**file.metadata, "llama.attention.head_count_kv": [2, 1]}))


def test_values_that_were_rounded_to_float32_are_decimals_again(tmp_path: Path) -> None:
    config = gguf_config(read_gguf(write_gguf(tmp_path / "tiny.gguf", replace(CONFIG, norm_eps=1e-6, rope_base=1e5))))
    assert (config.norm_eps, config.rope_base) == (1e-6, 1e5)


def test_what_is_no_gguf_file_is_named(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for name, content in (("empty", b""), ("other", b"PK" * 100), ("header", whole[:100]), ("short", whole[:-4000])):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.gguf"):
            load_gguf(path)
    with pytest.raises(ValueError, match=r"absent.gguf is no file"):
        load_gguf(tmp_path / "absent.gguf")


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    assert read_gguf(path) is read_gguf(str(path))
    write_gguf(path, replace(CONFIG, num_layers=1))
    assert load_gguf(path)[0].num_layers == 1


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        read_gguf(path)
