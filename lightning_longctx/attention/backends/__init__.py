"""What computes tiles of attention; the registry explains its choice."""

from lightning_longctx.attention.backends.contract import Backend, Dropout, Needs, Scores
from lightning_longctx.attention.backends.registry import BACKENDS, BackendName, choose_backend

__all__ = ["BACKENDS", "Backend", "BackendName", "Dropout", "Needs", "Scores", "choose_backend"]
