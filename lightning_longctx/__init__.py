"""Long-context training on PyTorch Lightning, with the same numbers as one process.

The names below load on first use, so that importing the package (in a data worker, say) costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_longctx.attention import attend
    from lightning_longctx.data import TextDataModule
    from lightning_longctx.loss import TiledLoss
    from lightning_longctx.mixins import CausalLM, HuggingFaceModule, LongContextMixin, NextTokenMixin
    from lightning_longctx.plan import Communication, Mask
    from lightning_longctx.strategy import LongContextStrategy, ShardingOptions
    from lightning_longctx.topology import Degrees, Links

__version__ = "0.1.0"

__all__ = [
    "CausalLM",
    "Communication",
    "Degrees",
    "HuggingFaceModule",
    "Links",
    "LongContextMixin",
    "LongContextStrategy",
    "Mask",
    "NextTokenMixin",
    "ShardingOptions",
    "TextDataModule",
    "TiledLoss",
    "attend",
]

_ROOMS = {
    "attend": "attention",
    "CausalLM": "mixins",
    "Communication": "plan",
    "Degrees": "topology",
    "HuggingFaceModule": "mixins",
    "Links": "topology",
    "LongContextMixin": "mixins",
    "LongContextStrategy": "strategy",
    "Mask": "plan",
    "NextTokenMixin": "mixins",
    "ShardingOptions": "strategy",
    "TextDataModule": "data",
    "TiledLoss": "loss",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
