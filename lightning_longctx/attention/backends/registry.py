"""Which backend computes a call, and why not the others."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Literal

from lightning_longctx.attention.backends.aten import Aten
from lightning_longctx.attention.backends.contract import Backend, Needs
from lightning_longctx.attention.backends.flash import Flash
from lightning_longctx.attention.backends.reference import Reference
from lightning_longctx.attention.backends.triton import Triton
from lightning_longctx.attention.backends.varlen import Varlen

BackendName = Literal["auto", "flash", "varlen", "aten", "triton", "reference"]

_ALL: tuple[Backend, ...] = (Flash(), Varlen(), Aten(), Triton(), Reference())
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _ALL}

PREFERENCE = {"cpu": ("aten", "reference"), "cuda": ("flash", "varlen", "aten", "triton", "reference")}
"""What ``auto`` asks, by device type, the fastest first."""

_log = logging.getLogger(__name__)


@lru_cache(maxsize=256)
def choose_backend(name: str, needs: Needs) -> Backend:
    """The backend called ``name``, or for ``auto`` the first that accepts.

    Raises:
        ValueError: ``name`` is unknown, or refuses; the message says why and what would do.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; choose auto or one of {list(BACKENDS)}.")
    reasons = refusals(needs)
    able = [other for other, reason in reasons.items() if reason is None]
    if name == "auto" and able:
        _log.info("%s: backend %s (%s)", needs, able[0], explain(reasons))
        return BACKENDS[able[0]]
    if name in able:
        return BACKENDS[name]
    raise ValueError(
        f"backend={name} cannot compute {needs}: {explain(reasons)}. "
        f"Use backend=" + " or ".join(["auto", *able] if able else ["reference with a floating-point dtype"]) + "."
    )


def refusals(needs: Needs) -> dict[str, str | None]:
    """Why a backend cannot compute that (None if it can), of all backends, in the order that ``auto`` asks them."""
    order = PREFERENCE.get(needs.device.type, ())
    return {
        name: BACKENDS[name].refusal(needs) for name in (*order, *(other for other in BACKENDS if other not in order))
    }


def explain(reasons: dict[str, str | None]) -> str:
    """One phrase a backend: able, or why not."""
    return "; ".join(f"{name}: {reason or 'able'}" for name, reason in reasons.items())
