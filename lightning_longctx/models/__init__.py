"""Models: a Llama-style decoder and its parts."""

from lightning_longctx.models.config import DecoderConfig
from lightning_longctx.models.decoder import MLP, Attention, Block, Decoder
from lightning_longctx.models.layers import Embedding, Linear, RMSNorm
from lightning_longctx.models.rope import rotary_angles, rotary_frequencies, rotate

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Decoder",
    "DecoderConfig",
    "Embedding",
    "Linear",
    "RMSNorm",
    "rotary_angles",
    "rotary_frequencies",
    "rotate",
]
