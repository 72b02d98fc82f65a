from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_longctx._resources import recipes_dir
from lightning_longctx.cli import main
from lightning_longctx.cli.recipes import listing, shipped, summary, with_shipped_recipes


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_every_recipe_says_in_its_first_line_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in shipped()} >= {"quickstart.yaml", "context2.yaml"}
    assert all(summary(path) for path in shipped())
    main(["recipes"])
    printed = capsys.readouterr().out
    assert printed.rstrip() == listing().rstrip()
    assert all(path.name in printed for path in shipped())


def test_a_bare_name_is_looked_up_among_the_shipped_recipes(tmp_path: Path) -> None:
    quickstart = str(recipes_dir() / "quickstart.yaml")
    fragment = str(recipes_dir() / "fragments" / "context2.yaml")
    given = ["fit", "--config", "quickstart.yaml", "-c", "context2.yaml", "--config=fragments/context2.yaml"]
    assert with_shipped_recipes(given) == ["fit", "--config", quickstart, "-c", fragment, f"--config={fragment}"]
    assert str(recipes_dir()) in sys.path
    others = ["--config", "none.yaml", "quickstart.yaml"]
    assert with_shipped_recipes(others) == others


def test_a_file_of_the_user_comes_before_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("")
    assert with_shipped_recipes(["--config", "quickstart.yaml"]) == ["--config", "quickstart.yaml"]


def test_copying_a_recipe_brings_its_module_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["recipes", "copy", "plain_module"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain_module.py", "plain_module.yaml"]
    assert (tmp_path / "plain_module.yaml").read_bytes() == (recipes_dir() / "plain_module.yaml").read_bytes()
    (tmp_path / "plain_module.yaml").unlink()
    (tmp_path / "plain_module.py").write_text("mine")
    for name, problem in (("plain_module.yaml", "exists already"), ("nothing", "no recipe 'nothing'")):
        with pytest.raises(SystemExit) as ended:
            main(["recipes", "copy", name])
        assert ended.value.code == 2
        assert problem in capsys.readouterr().err
    assert (tmp_path / "plain_module.py").read_text() == "mine"
    assert not (tmp_path / "plain_module.yaml").exists()


def test_modules_beside_a_recipe_can_be_named_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "own.yaml").write_text("")
    assert with_shipped_recipes(["--config", "mine/own.yaml"]) == ["--config", "mine/own.yaml"]
    assert str(folder) in sys.path
