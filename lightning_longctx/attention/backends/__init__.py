"""What computes one tile of attention; the registry explains its choice."""

from lightning_longctx.attention.backends.contract import Backend
from lightning_longctx.attention.backends.registry import BACKENDS, BackendName, choose_backend

__all__ = ["BACKENDS", "Backend", "BackendName", "choose_backend"]
