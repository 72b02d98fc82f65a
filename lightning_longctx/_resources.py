"""Where the folders that are shipped with the package lie, in a wheel and in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def recipes_dir() -> Path:
    """Folder of the shipped YAML recipes.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    return _shipped("recipes")


def kernels_dir() -> Path:
    """Folder of the Triton sources, importable as ``lightning_longctx.kernels``.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    return _shipped("kernels")


def _shipped(name: str) -> Path:
    # Only a wheel has recipes/ inside the package. Asking for `name` next to the package first would be wrong: in
    # site-packages that place may hold somebody else's package, such as Hugging Face's `kernels`.
    folder = (_PACKAGE if (_PACKAGE / "recipes").is_dir() else _PACKAGE.parent) / name
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: reinstall lightning-longctx, or run it from a whole checkout.")
    return folder
