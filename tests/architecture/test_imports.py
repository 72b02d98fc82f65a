"""Rooms import one way only, pure rooms stay pure, and importing anything starts nothing."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_longctx
from tests.architecture.places import PACKAGE, ROOT


def python(code: str, *, path: Path = ROOT) -> str:
    """Run code in a fresh interpreter that finds the package under ``path``; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root)


def test_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("room", "line", "report"),
    [
        ("topology", "from lightning_longctx.plan import tiles", "A room imports only"),
        ("plan", "import torch", "Layouts and plans are pure"),
        ("newroom", "", "- lightning_longctx.newroom"),
    ],
)
def test_contracts_bite(tmp_path: Path, room: str, line: str, report: str) -> None:
    """A wrong import in a copy of the tree, or a room without a place in the order, is reported."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    intruder = tmp_path / PACKAGE.name / room / "intruder.py"
    intruder.parent.mkdir(exist_ok=True)
    (intruder.parent / "__init__.py").touch()
    intruder.write_text(line + "\n")
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    assert report in done.stdout.partition("Broken contracts")[2]


@pytest.mark.parametrize("room", ["sequence", "plan"])
def test_pure_rooms_do_not_load_torch(room: str) -> None:
    loaded = python(f"import sys, lightning_longctx.{room}; print('torch' in sys.modules)")
    assert loaded == "False", f"importing lightning_longctx.{room} loads torch"


@pytest.mark.parametrize("room", ["models", "testing", "cli.bench.attention"])
def test_lightning_is_loaded_by_those_who_train(room: str) -> None:
    """It takes longer to import than torch: the ranks of a bench, and a training loop of the user's own, go without."""
    loaded = python(f"import sys, lightning_longctx.{room}; print('torch' in sys.modules, 'lightning' in sys.modules)")
    assert loaded == "True False", f"importing lightning_longctx.{room} loads Lightning"


def test_package_itself_is_light() -> None:
    assert python("import sys, lightning_longctx; print('torch' in sys.modules)") == "False"


def test_exports_resolve() -> None:
    for name in lightning_longctx.__all__:
        assert getattr(lightning_longctx, name).__name__ == name
    assert set(lightning_longctx.__all__) <= set(dir(lightning_longctx))
    assert not hasattr(lightning_longctx, "Degree")


def test_rooms_list_what_they_export() -> None:
    for room in sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")):
        module = importlib.import_module(f"lightning_longctx.{room}")
        assert module.__doc__, f"{room}/__init__.py does not say what the room is for"
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{room}/__init__.py lists {name}, which does not exist"


def test_importing_every_module_starts_nothing() -> None:
    code = """
import importlib, multiprocessing, pkgutil, threading
import torch.distributed as dist
import lightning_longctx
before = threading.active_count()
for module in pkgutil.walk_packages(lightning_longctx.__path__, "lightning_longctx."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(dist.is_initialized(), threading.active_count() - before, len(multiprocessing.active_children()))
"""
    assert python(code).splitlines()[-1] == "False 0 0"
