"""Hugging Face folders: equal logits in transformers both ways, bit for bit there and back, whole or refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_longctx.models import Decoder, DecoderConfig, RopeScaling, load_pretrained, save_pretrained

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
safetensors_errors = pytest.importorskip("safetensors")

LENGTH = 48
SHAPE: dict[str, Any] = dict(vocab_size=37, width=32, num_layers=3, num_heads=4, num_kv_heads=2, mlp_width=40)
SCALINGS = {
    "plain": None,
    "linear": RopeScaling("linear", 4.0),
    "dynamic": RopeScaling("dynamic", 2.0, 16),
    "llama3": RopeScaling("llama3", 8.0, 16, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": RopeScaling("yarn", 4.0, 16),
    "yarn in full": RopeScaling("yarn", 4.0, 16, beta_fast=8.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=1.0),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"max_positions": 64},
    "llama tied": {"tie_embeddings": True, "head_width": 10, "num_kv_heads": 1, "norm_eps": 1e-3},
    "qwen3": {"qk_norm": True, "head_width": 12, "rope_base": 1e6},
    "qwen3 windows": {"qk_norm": True, "windows": (7, None), "tie_embeddings": True},
}
CASES = [("llama", name) for name in SCALINGS] + [("qwen3", name) for name in SCALINGS]
CASES += [("llama tied", "plain"), ("llama tied", "llama3"), ("qwen3 windows", "plain"), ("qwen3 windows", "yarn")]


def shape(layout: str, scaling: str = "plain", **more: Any) -> DecoderConfig:
    return DecoderConfig(**{**SHAPE, **LAYOUTS[layout], "rope_scaling": SCALINGS[scaling], **more})


def weights(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: (torch.randn(w.shape) / 2).to(dtype) for name, w in Decoder(config).state_dict().items()}


def our_logits(config: DecoderConfig, state: dict[str, Tensor]) -> Tensor:
    model = Decoder(config).double()
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    with torch.no_grad():
        return model.eval()(tokens())


def their_logits(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return model.eval()(tokens()).logits


def assert_near(theirs: Tensor, ours: Tensor) -> None:
    """Transformers computes in float32: within 1e-5 of the largest logit."""
    torch.testing.assert_close(theirs.double(), ours, rtol=0, atol=1e-5 * float(ours.abs().max()))


def tokens() -> Tensor:
    return torch.randint(SHAPE["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(0))


def longest(config: DecoderConfig) -> int | None:
    """What must be said for shapes that do not say it."""
    known = config.max_positions or (config.rope_scaling and config.rope_scaling.original_max_position_embeddings)
    return None if known else 64


@pytest.mark.parametrize(("layout", "scaling"), CASES)
def test_exported_models_have_the_same_logits_in_transformers(layout: str, scaling: str, tmp_path: Path) -> None:
    config = shape(layout, scaling, max_positions=None)
    state = weights(config)
    save_pretrained(config, state, tmp_path / "model", max_position_embeddings=longest(config))
    assert_near(their_logits(tmp_path / "model"), our_logits(config, state))


@pytest.mark.parametrize(("layout", "scaling"), CASES)
def test_models_of_transformers_have_the_same_logits_here(layout: str, scaling: str, tmp_path: Path) -> None:
    config = shape(layout, scaling)
    theirs = their_model(config)
    theirs.save_pretrained(tmp_path / "model", max_shard_size="9KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    read, state = load_pretrained(tmp_path / "model")
    assert (read.layer_windows, read.rope_scaling, read.qk_norm) == (
        config.layer_windows,
        config.rope_scaling,
        config.qk_norm,
    )
    with torch.no_grad():
        assert_near(theirs.eval()(tokens()).logits, our_logits(read, state))


def their_model(config: DecoderConfig) -> Any:
    scaling = config.rope_scaling
    parameters = {"rope_type": scaling.rope_type, **scaling.given} if scaling else {"rope_type": "default"}
    dynamic = parameters["rope_type"] == "dynamic"
    length = parameters.pop("original_max_position_embeddings") if dynamic else 64
    options: dict[str, Any] = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.mlp_size,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=length,
        rope_parameters={**parameters, "rope_theta": config.rope_base},
        attn_implementation="eager",
    )
    windows = config.layer_windows
    if config.qk_norm and any(windows):
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        options |= dict(use_sliding_window=True, sliding_window=max(filter(None, windows)), layer_types=kinds)
    torch.manual_seed(2)
    if config.qk_norm:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize(("layout", "scaling"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_bit_for_bit(layout: str, scaling: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = shape(layout, scaling)
    config = shape(layout, scaling, max_positions=None) if config.rope_scaling else config
    state = weights(config, dtype)
    save_pretrained(config, state, tmp_path / "one", max_position_embeddings=longest(config))
    read, tensors = load_pretrained(tmp_path / "one")
    assert list(tensors) and tensors.keys() == state.keys()
    for name, tensor in state.items():
        assert tensors[name].dtype == dtype and torch.equal(tensors[name], tensor), name
    for option in ("layer_windows", "kv_heads", "head_size", "mlp_size", "rope_scaling", "rope_base", "norm_eps"):
        assert getattr(read, option) == getattr(config, option), option
    save_pretrained(read, tensors, tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_dtype_can_be_set_and_must_be_one(tmp_path: Path) -> None:
    config = shape("llama")
    state = weights(config)
    save_pretrained(config, state, tmp_path / "half", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_pretrained(tmp_path / "half")[1].values()} == {torch.bfloat16}
    back = load_pretrained(tmp_path / "half", dtype=torch.float64)[1]
    assert torch.equal(back["head.weight"], state["head.weight"].bfloat16().double())
    mixed = {**state, "norm.weight": state["norm.weight"].double()}
    with pytest.raises(ValueError, match=r"dtypes \['torch.float32', 'torch.float64'\].*Set dtype"):
        save_pretrained(config, mixed, tmp_path / "mixed")


def written(folder: Path, **changes: Any) -> Path:
    """A good folder whose tensors are then changed by their names in the file."""
    config = shape("llama tied" if "lm_head.weight" in changes else "llama", max_positions=64)
    save_pretrained(config, weights(config), folder)
    tensors = safetensors.load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor(tensors) if callable(tensor) else tensor
    safetensors.save_file(tensors, folder / "model.safetensors")
    return folder


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, "lacks model.layers.1.input_layernorm.weight"),
        ({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}, "has model.layers.3.mlp.up_proj.weight, which this"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "has model.layers.0.self_attn.q_proj.bias"),
        ({NORM: torch.ones(31)}, r"input_layernorm.weight is \[31\], but must be \[32\]"),
        ({"lm_head.weight": torch.ones(37, 32)}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_missing_and_unexpected_tensors_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_pretrained(written(tmp_path / "model", **changes))


def test_copies_and_tables_of_old_files_are_no_surprise(tmp_path: Path) -> None:
    changes = {
        "lm_head.weight": lambda tensors: tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    config, tensors = load_pretrained(written(tmp_path / "model", **changes))
    assert config.tie_embeddings and "head.weight" not in tensors
    Decoder(config).load_state_dict(tensors)


class Sharded:
    """Looks like a DTensor."""

    def __init__(self, whole: Tensor) -> None:
        self.shape, self.dtype, self.full_tensor = whole.shape, whole.dtype, lambda: whole


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    config = shape("llama")
    state = weights(config)
    lacking = {name: tensor for name, tensor in state.items() if name != "blocks.2.mlp.up.weight"}
    folder = tmp_path / "model"
    for broken, message in (
        (lacking, "the state dict lacks blocks.2.mlp.up.weight"),
        ({**state, "blocks.0.attention.sinks": torch.zeros(4)}, "has blocks.0.attention.sinks"),
        ({**state, "norm.weight": torch.zeros(3)}, r"norm.weight is \[3\], but must be \[32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            save_pretrained(config, broken, folder)
    with pytest.raises(ValueError, match="sinks=true has no place"):
        save_pretrained(shape("llama", sinks=True), weights(shape("llama", sinks=True)), folder)
    with pytest.raises(ValueError, match="norm.weight is sharded. Gather"):
        save_pretrained(config, {**state, "norm.weight": Sharded(state["norm.weight"])}, folder)  # type: ignore
    with pytest.raises(ValueError, match="known from nowhere: set max_position_embeddings"):
        save_pretrained(shape("qwen3"), weights(shape("qwen3")), folder)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_no_folder_and_the_next_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = shape("llama"), tmp_path / "model"

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(OSError, match="no space left"):
            save_pretrained(config, weights(config), folder)
    assert not folder.exists()
    save_pretrained(config, weights(config), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ValueError, match="model exists already"):
        save_pretrained(config, weights(config), folder)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ValueError, match="is the working directory, and would be replaced: choose another folder"):
        save_pretrained(config, weights(config), ".")
    save_pretrained(config, weights(config), "below")
    assert (tmp_path / "empty" / "below" / "config.json").is_file()


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = shape("llama", max_positions=64)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"file/model cannot be made .Not a directory.*Choose a folder"):
        save_pretrained(config, weights(config), tmp_path / "file" / "model")

    def full(*_: Any, **__: Any) -> None:
        raise safetensors_errors.SafetensorError("I/O error: no space left")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ValueError, match=r"model.safetensors cannot be written: I/O error: no space left"):
        save_pretrained(config, weights(config), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    theirs = their_model(shape("llama"))
    theirs.save_pretrained(tmp_path, max_shard_size="9KB")
    index = tmp_path / "model.safetensors.index.json"
    shards = sorted(tmp_path.glob("*.safetensors"))
    moved = safetensors.load_file(shards[0])
    safetensors.save_file({**moved, "extra": torch.ones(1)}, shards[0])
    with pytest.raises(ValueError, match="disagree about extra: the folder is not whole"):
        load_pretrained(tmp_path)
    shards[0].unlink()
    with pytest.raises(ValueError, match=f"{shards[0].name} is missing, but model.safetensors.index.json names it"):
        load_pretrained(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor model.safetensors.index.json"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is missing: give a folder"):
        load_pretrained(tmp_path)


def test_without_safetensors_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: load_pretrained(tmp_path), lambda: save_pretrained(shape("llama"), {}, tmp_path / "model")):
        with pytest.raises(ValueError, match="pip install safetensors"):
            call()
