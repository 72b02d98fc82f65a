"""How a query meets its keys: ring attention over context ranks."""

from lightning_longctx.attention import flops  # noqa: F401  registers formulas
from lightning_longctx.attention.attend import attend
from lightning_longctx.attention.intercept import intercepted
from lightning_longctx.attention.rings import close_ring, open_ring
from lightning_longctx.attention.token_dropout import token_dropout

__all__ = ["attend", "close_ring", "intercepted", "open_ring", "token_dropout"]
