"""A wheel carries the recipes and the kernels; no install makes ``kernels`` a top-level name."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import editables
import pytest

from lightning_longctx import __version__, _resources
from tests.architecture.places import ROOT

LOOK = """
import importlib.util, lightning_longctx
from lightning_longctx import _resources as resources, kernels
print(importlib.util.find_spec("kernels"), importlib.util.find_spec("tests"), importlib.util.find_spec("recipes"))
print(lightning_longctx.__file__)
print(resources.recipes_dir())
print(list(kernels.__path__)[0])
"""


def build_editable(folder: Path) -> Path:
    """Call the build backend offline, in a fresh interpreter; return the wheel it wrote."""
    folder.mkdir()
    call = f"import hatchling.build; print(hatchling.build.build_editable({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.strip().splitlines()[-1]


def look(site: Path) -> list[str]:
    """What a fresh interpreter outside the checkout sees if ``site`` is its one site-packages folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    code = f"import site, sys; sys.path.insert(0, {str(site)!r}); site.addsitedir({str(site)!r})\n{LOOK}"
    command = [sys.executable, "-S", "-c", code]  # -S: without what else is installed here
    done = subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def unpack(wheel: Path, site: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        return archive.namelist()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as an index would: so that one must be complete too."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_wheel_contents(wheel: Path, tmp_path: Path) -> None:
    names = set(unpack(wheel, tmp_path / "site"))
    assert wheel.name == f"lightning_longctx-{__version__}-py3-none-any.whl"
    for folder in ("recipes", "kernels"):
        shipped = {f"lightning_longctx/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.*")}
        assert {name for name in shipped if "__pycache__" not in name} <= names
    assert "lightning_longctx/recipes/quickstart.yaml" in names
    assert {"lightning_longctx/py.typed", "lightning_longctx/kernels/__init__.py"} <= names
    info = f"lightning_longctx-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"lightning_longctx", info}
    assert f"{info}/licenses/LICENSE" in names


def test_wheel_install(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    unpack(wheel, site)
    top_level, package, recipes, kernels = look(site)
    assert top_level == "None None None"
    assert Path(package).parent == site / "lightning_longctx"
    assert Path(recipes) == site / "lightning_longctx" / "recipes"
    assert Path(kernels) == site / "lightning_longctx" / "kernels"


def test_wheel_beside_another_kernels_package(wheel: Path, tmp_path: Path) -> None:
    """Hugging Face's ``kernels`` in the same site-packages stays itself, and is not taken for ours."""
    site = tmp_path / "site"
    unpack(wheel, site)
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").touch()
    top_level, _, _, kernels = look(site)
    assert "site/kernels/__init__.py" in top_level
    assert Path(kernels) == site / "lightning_longctx" / "kernels"


def test_editable_install(tmp_path: Path) -> None:
    built = build_editable(tmp_path / "dist")
    names = unpack(built, tmp_path / "site")
    assert not [name for name in names if name.startswith("lightning_longctx/")], "copies would go stale"
    (tmp_path / "site" / "editables").symlink_to(Path(editables.__file__).parent)
    top_level, package, recipes, kernels = look(tmp_path / "site")
    assert top_level == "None None None"
    assert Path(package).parent == ROOT / "lightning_longctx"
    assert Path(recipes) == ROOT / "recipes"
    assert Path(kernels) == ROOT / "kernels"


def test_missing_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_resources, "_PACKAGE", tmp_path / "lightning_longctx")
    with pytest.raises(FileNotFoundError, match="recipes is missing"):
        _resources.recipes_dir()
