"""What a user's module may inherit: options and helpers, or a whole language model."""

from lightning_longctx.mixins.causal_lm import CausalLM
from lightning_longctx.mixins.hugging_face import HuggingFaceModule
from lightning_longctx.mixins.long_context import LongContextMixin
from lightning_longctx.mixins.next_token import NextTokenMixin

__all__ = ["CausalLM", "HuggingFaceModule", "LongContextMixin", "NextTokenMixin"]
