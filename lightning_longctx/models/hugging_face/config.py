"""What a Hugging Face configuration says of attention: heads, windows, and what cannot be done over ranks."""

from __future__ import annotations

from typing import Any

from lightning_longctx.plan.mask import Mask

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")
"""What configurations call the dropout of attention weights."""


def text_config(config: Any) -> Any:
    """The part about the decoder of text; most configurations have no other."""
    return config.get_text_config(decoder=True)


def attention_heads(config: Any) -> tuple[int, int] | None:
    """Query heads and key/value heads of a layer; None if the configuration does not say."""
    text = text_config(config)
    heads = getattr(text, "num_attention_heads", None)
    return None if heads is None else (heads, getattr(text, "num_key_value_heads", None) or heads)


def attention_head_width(config: Any) -> int | None:
    """Width of a head; None if the configuration does not say."""
    text, heads = text_config(config), attention_heads(config)
    if (width := getattr(text, "head_dim", None)) is not None or heads is None:
        return width
    hidden = getattr(text, "hidden_size", None)
    return None if hidden is None else hidden // heads[0]


def attention_masks(config: Any) -> tuple[Mask, ...]:
    """The mask of every layer, as far as the configuration says: what ``layout: auto`` counts with."""
    text = text_config(config)
    window = getattr(text, "sliding_window", None)
    layers = getattr(text, "layer_types", None) or ["sliding_attention"] * (getattr(text, "num_hidden_layers", 0) or 1)
    return tuple(Mask(window=window if layer == "sliding_attention" else None) for layer in layers)


def attention_dropout(config: Any) -> float:
    """The largest dropout of attention weights that the configuration has, by whatever name."""
    text = text_config(config)
    return max(getattr(text, name, None) or 0.0 for name in _DROPOUTS)


def config_refusal(config: Any) -> str | None:
    """What of a configuration cannot be done over a sharded sequence; None if all can."""
    text = text_config(config)
    if getattr(config, "is_encoder_decoder", False):
        return "is_encoder_decoder=true: cross-attention is not available"
    if getattr(text, "is_causal", True) is False:
        return "is_causal=false: only causal attention is available"
    if others := sorted(set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS):
        return f"layer_types with {', '.join(others)}: only full and sliding attention are available"
    if getattr(text, "output_attentions", False):
        return "output_attentions=true: attention weights are never whole"
    if getattr(text, "attn_temperature_tuning", False) and not all(getattr(text, "no_rope_layers", None) or [False]):
        return (
            "attn_temperature_tuning=true and layers without rotary positions (0 in no_rope_layers), which scale "
            "queries by their place in the shard; set attn_temperature_tuning=false if the model may do without"
        )
    return None
