"""What a user's module may inherit: options and helpers, or a whole language model."""

from lightning_longctx.mixins.causal_lm import CausalLM
from lightning_longctx.mixins.long_context import LongContextMixin

__all__ = ["CausalLM", "LongContextMixin"]
