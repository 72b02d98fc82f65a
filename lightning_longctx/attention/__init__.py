"""How a query meets its keys: ring attention over context ranks."""

from lightning_longctx.attention.attend import attend
from lightning_longctx.attention.intercept import intercepted
from lightning_longctx.attention.rings import close_ring, open_ring

__all__ = ["attend", "close_ring", "intercepted", "open_ring"]
