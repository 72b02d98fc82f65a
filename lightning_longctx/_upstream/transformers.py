"""Configurations and models of Hugging Face transformers."""

from __future__ import annotations

from typing import Any


def attention_of(config: Any) -> str | None:
    """Which attention a Hugging Face configuration names."""
    return config._attn_implementation


def set_attention(config: Any, name: str | None) -> None:
    """Let it name another one; configurations inside it keep theirs."""
    config._attn_implementation_internal = name


def keeps_a_state(model: Any) -> bool:
    """Whether a Hugging Face model has a state that goes from token to token, as Mamba's does."""
    return model._is_stateful
