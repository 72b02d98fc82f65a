"""Values of recipes arrive as what they look like: numbers as numbers, in typed and in untyped places."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longctx._resources import recipes_dir
from lightning_longctx.cli import main

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
RECIPES = sorted(path.name for path in recipes_dir().glob("*.yaml"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, Any]]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments, "--print_config"])
    output = capsys.readouterr()
    assert not ended.value.code, output.err
    return output.out, yaml.safe_load(output.out)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield from leaves(member, f"{path}.{key}")
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from leaves(member, f"{path}[{index}]")
    else:
        yield path, value


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_number_of_a_recipe_is_text(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B56: anywhere in a shipped recipe."""
    _, config = printed(capsys, "--config", recipe)
    found = [(path, value) for path, value in leaves(config) if isinstance(value, str) and NUMBER.fullmatch(value)]
    assert not found


MODULE = """
from lightning.pytorch import LightningModule

class Mine(LightningModule):
    def __init__(self, options: dict, anything=None, rate: float = 0.1):
        super().__init__()
"""
RECIPE = """
model:
  class_path: module_of_values.Mine
  init_args:
    options: {lr: 1e-4, eps: 1E-8, big: 2e5, betas: [9e-1, .95], text: "1e-4 per step", name: e4}
    anything: {lr: 3e-3, steps: 10}
    rate: 1e-4
trainer:
  strategy:
    class_path: lightning_longctx.LongContextStrategy
    init_args: {degrees: {context: 2}, layout: striped, sequence_dims: {bias: -1}}
  devices: 2
  accelerator: cpu
"""


def test_numbers_with_exponents_in_places_without_a_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B56: 1e-4 is text to YAML itself; here it is a number also where no type says so, and stays one when saved."""
    (tmp_path / "module_of_values.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    text, config = printed(capsys, "--config", "mine.yaml")
    values = config["model"]["init_args"]
    assert values["options"] == {
        "lr": 1e-4, "eps": 1e-8, "big": 2e5, "betas": [0.9, 0.95], "text": "1e-4 per step", "name": "e4"
    }  # fmt: skip
    assert values["anything"] == {"lr": 3e-3, "steps": 10} and values["rate"] == 1e-4
    strategy = config["trainer"]["strategy"]["init_args"]
    assert (strategy["layout"], strategy["sequence_dims"]) == ("striped", {"bias": -1})
    assert strategy["degrees"]["context"] == 2
    (tmp_path / "saved.yaml").write_text(text)
    again, _ = printed(capsys, "--config", "saved.yaml")
    assert again == text
