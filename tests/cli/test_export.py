"""A checkpoint of any degrees becomes a Hugging Face folder with the trained weights, or one message says why not."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longctx import CausalLM, Degrees, LongContextStrategy
from lightning_longctx._upstream import METADATA_FILENAME
from lightning_longctx.cli import main
from lightning_longctx.cli.export import export
from lightning_longctx.models import Decoder, DecoderConfig, RopeScaling, load_pretrained
from tests.cases.tiny import QUIET, SGD, named_weights, samples

pytest.importorskip("safetensors")

SHAPE = DecoderConfig(
    vocab_size=32,
    width=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    qk_norm=True,
    windows=(8, None),
    rope_scaling=RopeScaling("yarn", 4.0, 8),
    tie_embeddings=True,
)


def trained(path: Path, sharded: bool) -> dict[str, Tensor]:
    """Save a module after one step, and return its weights."""
    from lightning.pytorch import Trainer

    torch.manual_seed(0)
    module = CausalLM(SHAPE, optimizer=SGD)
    strategy = LongContextStrategy(Degrees(context=2), sharding="fsdp", save_distributed_checkpoint=sharded)
    trainer = Trainer(strategy=strategy, devices=2, max_steps=1, **QUIET)
    trainer.fit(module, DataLoader(samples(2), batch_size=2))  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    return named_weights(module)


@pytest.mark.parametrize("sharded", [True, False])
def test_the_folder_holds_what_was_trained(gloo: Any, tmp_path: Path, sharded: bool, capsys: Any) -> None:
    weights, _ = gloo(2).run(trained, tmp_path / "last.ckpt", sharded)
    assert (tmp_path / "last.ckpt").is_dir() == sharded
    torch.manual_seed(0)
    assert not torch.equal(weights["decoder.norm.weight"], Decoder(SHAPE).norm.weight)
    main(["export", str(tmp_path / "last.ckpt"), str(tmp_path / "model")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    config, tensors = load_pretrained(tmp_path / "model")
    assert (config.layer_windows, config.rope_scaling, config.qk_norm) == ((8, None), SHAPE.rope_scaling, True)
    assert config.max_positions == 32
    assert tensors.keys() == {name.removeprefix("decoder.") for name in weights}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, weights[f"decoder.{name}"]), name


PLAIN = DecoderConfig(32, 16, 1, 2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint in one file, of a version that did not write down the shape."""
    weights = {f"decoder.{name}": tensor for name, tensor in Decoder(PLAIN).state_dict().items()}
    torch.save({"state_dict": weights}, tmp_path / "old.ckpt")
    return tmp_path / "old.ckpt"


def refused(capsys: Any, *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_options_are_honoured(saved: Path, tmp_path: Path, capsys: Any) -> None:
    assert "does not say the shape of its model" in refused(capsys, saved, tmp_path / "model")
    decoder = tmp_path / "decoder.yaml"
    decoder.write_text(yaml.safe_dump({"vocab_size": 32, "width": 16, "num_layers": 1, "num_heads": 2}))
    assert "known from nowhere" in refused(capsys, saved, tmp_path / "model", "--decoder", decoder)
    options = ["--dtype", "bfloat16", "--max_position_embeddings", "99", "--decoder", str(decoder)]
    main(["export", str(saved), str(tmp_path / "model"), *options])
    config, tensors = load_pretrained(tmp_path / "model")
    assert config.max_positions == 99 and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "exists already" in refused(capsys, saved, tmp_path / "model", *options)


def test_what_is_no_checkpoint_of_the_model_is_refused(saved: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "model"
    assert "is no checkpoint: neither a file nor" in refused(capsys, tmp_path, folder)
    (tmp_path / "text.ckpt").write_text("nothing")
    assert "text.ckpt cannot be read" in refused(capsys, tmp_path / "text.ckpt", folder)
    torch.save({"state_dict": {"model.weight": torch.ones(1)}}, tmp_path / "other.ckpt")
    assert "holds no weights of a CausalLM" in refused(capsys, tmp_path / "other.ckpt", folder)
    stated = torch.load(saved) | {"decoder_config": PLAIN.to_dict()}
    torch.save(stated, saved)
    assert "decoder differs from what" in refused(capsys, saved, folder, "--decoder.width", "8")
    assert "num_heads=4 does not divide width=15" in refused(capsys, saved, folder, "--decoder.width", "15")
    assert not folder.exists()


def last_line(capsys: Any, *arguments: object) -> str:
    """The message of a refusal; it stands alone on the last line."""
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    assert ended.value.code == 2
    *_, tip, message = capsys.readouterr().err.splitlines()
    assert tip.startswith("tip: ") and message.startswith("error: ")
    return message.removeprefix("error: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello", "KeyError: 101"),
        (b"", "the file is empty or ends too early"),
        (b"nothing", "UnpicklingError: Unsupported operand 110"),
        (b"PK\x03\x04" + b"x" * 90, "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding.*"),
    ],
)
def test_a_broken_file_is_named_with_the_reason(tmp_path: Path, capsys: Any, content: bytes, reason: str) -> None:
    path = tmp_path / "junk.ckpt"
    path.write_bytes(content)
    message = rf"{path} cannot be read \({reason}\)\. Give a checkpoint that Lightning saved, whole"
    assert re.match(message, last_line(capsys, path, tmp_path / "model"))
    with pytest.raises(ValueError, match=message):
        export(str(path), str(tmp_path / "model"))


def test_what_a_checkpoint_holds_beside_plain_values_is_named(tmp_path: Path, capsys: Any) -> None:
    torch.save({"state_dict": {}, "path": tmp_path}, tmp_path / "object.ckpt")
    message = last_line(capsys, tmp_path / "object.ckpt", tmp_path / "model")
    assert "UnpicklingError: Unsupported global: GLOBAL pathlib" in message and "weights_only" not in message


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"decoder_config": {"future": 1}}, "decoder_config in .*old.ckpt: the decoder has no option 'future'"),
        ({"decoder_config": [1]}, "decoder_config in .*old.ckpt: the decoder's options are a list"),
        ({"decoder_config": {"rope_scaling": 2.0}}, "decoder_config in .*old.ckpt: rope_scaling=2.0 must be a mapping"),
        ({"state_dict": [1]}, "old.ckpt holds no weights of a CausalLM"),
        ({"state_dict": {1: 2}}, "old.ckpt holds no weights of a CausalLM"),
        ({"state_dict": {"decoder.norm.weight": 2}}, "old.ckpt: decoder.norm.weight is no tensor"),
    ],
)
def test_wrong_entries_are_named(
    saved: Path, tmp_path: Path, capsys: Any, entries: dict[str, Any], message: str
) -> None:
    torch.save(torch.load(saved) | entries, saved)
    assert re.search(message, last_line(capsys, saved, tmp_path / "model"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_that_is_not_whole_is_named(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "sharded.ckpt"
    dcp.save({"state_dict": {"decoder.norm.weight": torch.ones(16)}}, checkpoint_id=path)
    torch.save({}, path / METADATA_FILENAME)
    (shard,) = path.glob("*.distcp")
    os.truncate(shard, 10)
    assert f"{path} cannot be read (RuntimeError: " in last_line(capsys, path, tmp_path / "model")
    shard.unlink()
    message = last_line(capsys, path, tmp_path / "model")
    assert f"{path} cannot be read (FileNotFoundError: " in message and shard.name in message
    (path / ".metadata").write_bytes(b"hello")
    assert f"{path} cannot be read (UnpicklingError: " in last_line(capsys, path, tmp_path / "model")


def test_a_folder_that_cannot_be_made_is_named(saved: Path, tmp_path: Path, capsys: Any) -> None:
    torch.save(torch.load(saved) | {"decoder_config": PLAIN.to_dict() | {"max_positions": 64}}, saved)
    for folder, reason in ((saved / "sub", "Not a directory"), (Path("/proc/x"), "No such file or directory")):
        message = last_line(capsys, saved, folder)
        assert message.startswith(f"{folder} cannot be made ({reason}). Choose a folder"), message
    assert "File name too long" in last_line(capsys, saved, tmp_path / ("x" * 300))


def test_a_shape_survives_as_plain_values() -> None:
    for config in (PLAIN, SHAPE):
        assert DecoderConfig.from_dict(yaml.safe_load(yaml.safe_dump(_lists(config.to_dict())))) == config


def _lists(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "windows": list(options["windows"])}
