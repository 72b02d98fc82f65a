"""The ready module of transformers: options, files in and out, and the same numbers for all degrees."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from safetensors.torch import load_file

from lightning_longctx.mixins import HuggingFaceModule
from lightning_longctx.models.hugging_face.files import build_model, read_config, write_model
from lightning_longctx.plan.mask import Mask
from lightning_longctx.topology import Degrees
from tests.mixins.hf_runs import CONFIG, fit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers on disk, in bfloat16."""
    path = tmp_path_factory.mktemp("hf") / "start"
    torch.manual_seed(0)
    build_model(None, read_config(CONFIG | {"initializer_range": 0.2}, {}), "bfloat16").save_pretrained(path)
    return path


def logits(path: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model(torch.arange(32)[None], use_cache=False).logits


def test_nothing_is_read_at_construction_and_the_model_is_built_once() -> None:
    module = HuggingFaceModule("no such folder, no such name")
    assert not list(module.parameters())
    module = HuggingFaceModule(CONFIG)
    module.configure_model()
    first = module.model
    module.configure_model()
    assert module.model is first and first.training
    assert {weight.dtype for weight in first.parameters()} == {torch.float32}
    assert isinstance(module.configure_optimizers(), torch.optim.AdamW)


def test_a_configuration_is_known_before_the_model() -> None:
    layers = ["full_attention", "sliding_attention"]
    module = HuggingFaceModule(
        CONFIG, overrides={"layer_types": layers, "use_sliding_window": True, "sliding_window": 6}
    )
    assert module.attention_masks == (Mask(), Mask(window=6))
    assert module.attention_heads == (4, 2)


def test_options(folder: Path) -> None:
    loaded = HuggingFaceModule(str(folder))
    loaded.configure_model()
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    drawn = HuggingFaceModule(str(folder), pretrained=False, dtype="bfloat16", gradient_checkpointing=True)
    torch.manual_seed(5)
    drawn.configure_model()
    assert {weight.dtype for weight in drawn.model.parameters()} == {torch.bfloat16}
    first, last = drawn.model.model.layers[0], loaded.model.model.layers[0]
    assert first.gradient_checkpointing and not last.gradient_checkpointing
    assert not torch.equal(drawn.model.lm_head.weight.float(), loaded.model.lm_head.weight)
    same = HuggingFaceModule(str(folder), dtype="auto", overrides={"attention_dropout": 0.25})
    same.configure_model()
    assert {weight.dtype for weight in same.model.parameters()} == {torch.bfloat16}
    assert torch.equal(same.model.lm_head.weight.float(), loaded.model.lm_head.weight)
    assert same.model.model.layers[0].self_attn.attention_dropout == 0.25


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pretrained=true with a configuration"):
        HuggingFaceModule(CONFIG, pretrained=True)
    with pytest.raises(ValueError, match=r"model has num_layer, .*Qwen3Config does not know.*num_hidden_layers"):
        HuggingFaceModule(CONFIG | {"num_layer": 3}).configure_model()
    with pytest.raises(ValueError, match="overrides has rope_thetta"):
        HuggingFaceModule(CONFIG, overrides={"rope_thetta": 1e6}).configure_model()
    with pytest.raises(ValueError, match="has no model_type, such as llama"):
        HuggingFaceModule({"hidden_size": 16}).configure_model()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="holds no model .config.json.: it would be replaced"):
        HuggingFaceModule(CONFIG, save_to=str(tmp_path)).configure_model()


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is the working directory, or around it, and would be replaced"):
        HuggingFaceModule(CONFIG, save_to=".").configure_model()


@pytest.mark.parametrize("beside", ["tokenizer.json", "notes", "model.safetensors.bak", ".git"])
def test_what_lies_beside_a_model_is_not_removed(folder: Path, tmp_path: Path, beside: str) -> None:
    target = tmp_path / "out"
    target.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors"):
        (target / name).touch()
    (target / "model.safetensors.index.json").touch()
    module = HuggingFaceModule(CONFIG, save_to=str(target))
    module.configure_model()
    (target / beside).mkdir() if beside == "notes" else (target / beside).touch()
    with pytest.raises(ValueError, match=f"holds more than a model .{beside}., and would be replaced whole"):
        module.configure_model()
    with pytest.raises(ValueError, match="holds more than a model"):
        module.save_pretrained(target)
    assert (target / beside).exists() and (target / "config.json").stat().st_size == 0


def test_the_model_that_was_read_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    for target in (folder, f"{folder}/", tmp_path / "link"):
        with pytest.raises(ValueError, match="is the folder that the model comes from"):
            HuggingFaceModule(str(folder), save_to=str(target)).configure_model()
    module = HuggingFaceModule(str(folder))
    module.configure_model()
    with pytest.raises(ValueError, match="is the folder that the model comes from"):
        module.save_pretrained(folder)


def test_a_validation_writes_nothing_and_asks_for_no_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    module = HuggingFaceModule(CONFIG, save_to=str(tmp_path))
    module.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.VALIDATING))  # type: ignore[assignment]
    module.configure_model()
    module.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="holds no model"):
        module.configure_model()


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_longctx.models.hugging_face.files.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install 'transformers>=5'"):
        HuggingFaceModule(CONFIG).configure_model()


def test_a_model_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = HuggingFaceModule(CONFIG)
    module.configure_model()
    target = tmp_path / "out"
    module.save_pretrained(target)
    names = {path.name for path in target.iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    before = logits(target)

    def half(folder: Path, state_dict: object) -> None:
        (folder / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setattr(module.model, "save_pretrained", half)
    with pytest.raises(OSError, match="disk full"):
        module.save_pretrained(target)
    assert {path.name for path in target.iterdir()} == names and torch.equal(logits(target), before)
    monkeypatch.undo()
    with torch.no_grad():
        module.model.model.norm.weight.mul_(2)
    module.save_pretrained(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not torch.equal(logits(target), before)
    (target / "config.json").unlink()
    with pytest.raises(ValueError, match="holds no model"):
        write_model(module.model, target)


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
def test_fine_tuning_a_folder_gives_the_same_folder(gloo, folder: Path, tmp_path: Path, sharding: str) -> None:
    """Logged values, and the logits of what was saved, with tied embeddings, read by transformers."""
    one, several = tmp_path / "one", tmp_path / "several"
    ((losses, validations, after),) = gloo(1).run(fit, str(folder), Degrees(), str(one))
    results = gloo(2).run(fit, str(folder), Degrees(context=2), str(several), sharding, gradient_checkpointing=True)
    for result in results:
        assert result[0] == pytest.approx(losses, rel=1e-5)
        assert result[1][-1] == pytest.approx(validations[-1], rel=1e-5)
        assert result[2] == pytest.approx(after, rel=1e-5) and after == pytest.approx(validations[-1]["val_loss"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several"]
    weights, expected = load_file(several / "model.safetensors"), load_file(one / "model.safetensors")
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
    assert "lm_head.weight" not in weights and weights["model.norm.weight"].dtype == torch.float32
    assert (logits(several) - logits(folder)).abs().max() > 1e-3
    saved = json.loads((several / "config.json").read_text())
    assert saved["architectures"] == ["Qwen3ForCausalLM"] and saved["tie_word_embeddings"]
    assert "longctx" not in (several / "config.json").read_text()
