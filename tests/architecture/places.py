"""Where things lie in the checkout, and the Python files of the package."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_longctx"


def sources(*folders: str) -> list[Path]:
    """Python files under the named folders of the checkout (the package and the tests by default)."""
    found = [path for folder in folders or ("lightning_longctx", "tests") for path in (ROOT / folder).rglob("*.py")]
    return sorted(found)


@cache
def tree(path: Path) -> ast.Module:
    """Parsed source of one file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.AST | None = None) -> str:
    """``folder/file.py:line``, for messages."""
    line = getattr(node, "lineno", None)
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line else "")
