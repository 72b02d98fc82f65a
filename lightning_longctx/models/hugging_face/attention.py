"""Attention over ranks under transformers' own interface: a name in its registries, and what the name does."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_longctx.attention.attend import attend
from lightning_longctx.models.hugging_face.config import attention_heads
from lightning_longctx.models.hugging_face.masks import ShardMask, shard_mask
from lightning_longctx.sequence.record import SequenceRecord

NAME = "longctx"
"""What ``attn_implementation`` is called in transformers."""

_HARMLESS = {
    "num_items_in_batch",  # of the loss, which gets the same keywords
    "shift_labels",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",  # the record knows more
}


def register() -> None:
    """Make the name known to transformers: as attention, and as what makes its masks.

    Raises:
        ValueError: This version of transformers has no such registries.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as missing:
        raise ValueError(
            "this version of transformers has no registry of masks, without which causality would be lost: "
            "pip install --upgrade 'transformers>=5'."
        ) from missing
    AttentionInterface.register(NAME, shard_attention)
    AttentionMaskInterface.register(NAME, shard_mask)


def shard_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ShardMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    sequence: SequenceRecord | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that layers of transformers call.

    Args:
        module: The layer.
        query: [B, Hq, T, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, D].
        attention_mask: From ``shard_mask``.
        dropout: Probability; layers pass 0 in evaluation.
        scaling: Factor on the scores.
        sliding_window: What the layer says of its window; the mask must say the same.
        softcap: See ``attend``.
        s_aux: [Hq], the sinks.
        is_causal: What the layer says of its mask; None asks ``module.is_causal``.
        sequence: The keyword that the model's forward was given, if the layer passes it on: the mask has it too.
        **others: Further keywords; those that would change the numbers must not be set.

    Returns:
        [B, T, Hq, D], and no weights.

    Raises:
        ValueError: The layer asks for something that cannot be honoured.
    """
    mask = _checked_mask(module, attention_mask, sliding_window, is_causal)
    layer = type(module).__name__
    if sequence is not None and sequence != mask.sequence:
        raise ValueError(f"{layer} got another sequence record than its model. Pass one: batch['sequence'].")
    _check_keywords(layer, others)
    out = attend(
        query,
        key,
        value,
        sequence=mask.sequence,
        window=mask.window,
        sinks=s_aux,
        scale=scaling,
        softcap=softcap,
        dropout_p=dropout,
        num_heads=_num_heads(module, query, mask.sequence) if dropout else None,
    )
    return out.transpose(1, 2).contiguous(), None


def _num_heads(module: nn.Module, query: Tensor, sequence: SequenceRecord) -> int | None:
    """Query heads of the layer, where tensor ranks hold a part of them each."""
    heads = attention_heads(module.config) if sequence.tensor > 1 else None
    if heads is None or heads[0] == query.shape[1]:
        return None
    return heads[0]


def _checked_mask(
    module: nn.Module, mask: ShardMask | Tensor | None, sliding_window: int | None, is_causal: bool | None
) -> ShardMask:
    """The mask, if it is of ours and the layer says nothing else."""
    layer = type(module).__name__
    if not isinstance(mask, ShardMask):
        found = "no mask" if mask is None else f"a mask of type {type(mask).__name__}"
        raise ValueError(
            f"{layer} got {found} that was not made through transformers' mask registry (an attention_mask of four "
            "dims, or a layer that looks both ways): over a sharded sequence only causal attention is known. Leave the "
            "mask out, or train with context=1 and head=1."
        )
    if sliding_window is not None and sliding_window != mask.window:
        raise ValueError(
            f"{layer} has sliding_window={sliding_window}, but its mask has {mask.window}: one must be wrong."
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"{layer} has is_causal=False, which its causal mask contradicts. Train with context=1.")
    return mask


def _check_keywords(layer: str, keywords: dict[str, Any]) -> None:
    """Refuse what is set and would have to be honoured."""
    given = {name for name, value in keywords.items() if value is not None and value is not False}
    if unknown := sorted(given - _HARMLESS):
        raise ValueError(
            f"{layer} passes {', '.join(unknown)} to attention, which cannot be honoured over a sharded sequence. "
            "Leave it out of the model's call or config, or train with context=1 and head=1."
        )
