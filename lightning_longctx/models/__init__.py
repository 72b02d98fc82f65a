"""Models: a Llama-style decoder and its parts."""

from lightning_longctx.models.config import DecoderConfig
from lightning_longctx.models.decoder import MLP, Attention, Block, Decoder
from lightning_longctx.models.layers import Embedding, Linear, RMSNorm
from lightning_longctx.models.pretrained.folders import load_pretrained, save_pretrained
from lightning_longctx.models.rope import rotary_angles, rotary_frequencies, rotate
from lightning_longctx.models.rope_scaling import RopeScaling

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Decoder",
    "DecoderConfig",
    "Embedding",
    "Linear",
    "RMSNorm",
    "RopeScaling",
    "load_pretrained",
    "rotary_angles",
    "rotary_frequencies",
    "rotate",
    "save_pretrained",
]
