"""Which backend computes a tile, and why not the others."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch

from lightning_longctx.attention.backends.aten import Aten
from lightning_longctx.attention.backends.contract import Backend
from lightning_longctx.attention.backends.reference import Reference

BackendName = Literal["auto", "reference", "aten"]

BACKENDS: dict[str, Backend] = {"aten": Aten(), "reference": Reference()}
"""In the order ``auto`` prefers them."""


@lru_cache(maxsize=64)
def choose_backend(name: str, device: torch.device, dtype: torch.dtype, width: int) -> Backend:
    """The backend called ``name``, or for ``auto`` the first that accepts.

    Raises:
        ValueError: ``name`` is unknown, or refuses these inputs; the message says why and what would do.
    """
    reasons = {other: backend.refusal(device, dtype, width) for other, backend in BACKENDS.items()}
    able = [other for other, reason in reasons.items() if reason is None]
    if name == "auto" and able:
        return BACKENDS[able[0]]
    if name in able:
        return BACKENDS[name]
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; choose auto or one of {list(BACKENDS)}.")
    raise ValueError(
        f"backend={name} cannot compute attention of width {width} in {dtype} on {device.type}: {explain(reasons)}. "
        f"Use backend=" + " or ".join(["auto", *able] if able else ["reference with a floating-point dtype"]) + "."
    )


def explain(reasons: dict[str, str | None]) -> str:
    """One phrase a backend: able, or why not."""
    return "; ".join(f"{name}: {reason or 'able'}" for name, reason in reasons.items())
