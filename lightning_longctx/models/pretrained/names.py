"""What our tensors are called in Hugging Face's Llama and Qwen3 checkpoints, and back: one table."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_longctx.models.config import DecoderConfig
from lightning_longctx.models.decoder import Decoder

OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
"""Tensors outside the blocks: our name, and theirs."""

INSIDE = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
"""Tensors of a block: our name below ``blocks.N``, and theirs below ``model.layers.N``. The matrices are the same: both
sides rotate halves of a head and lay heads one after another."""

DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints also hold this table, which their own ``config.json`` determines."""


def expected_shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """Name and shape of every tensor that a decoder of this shape has."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}


def hugging_face_name(name: str) -> str:
    """Their name of one of our tensors.

    Raises:
        ValueError: The layout has no such tensor.
    """
    if name in OUTSIDE:
        return OUTSIDE[name]
    folder, _, rest = name.partition(".")
    layer, _, inside = rest.partition(".")
    if folder != "blocks" or not layer.isdecimal() or inside not in INSIDE:
        raise ValueError(f"tensor {name!r} has no place in the Llama and Qwen3 layouts.")
    return f"model.layers.{layer}.{INSIDE[inside]}"


def to_hugging_face(config: DecoderConfig, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict under their names.

    Raises:
        ValueError: A tensor is missing, unexpected, misshapen or sharded; the message names it.
    """
    check_tensors(expected_shapes(config), state_dict, "the state dict")
    return {hugging_face_name(name): tensor for name, tensor in state_dict.items()}


def from_hugging_face(config: DecoderConfig, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Their tensors under our names.

    Args:
        config: Shape of the model.
        tensors: By their names. A head that is tied to the embedding may be there too, if it is the same.
        source: Where they come from, for messages.

    Raises:
        ValueError: A tensor is missing, unexpected or misshapen; the message names it.
    """
    shapes = expected_shapes(config)
    theirs = {hugging_face_name(name): name for name in shapes}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(DERIVED)}
    head = tensors.get("lm_head.weight") if config.tie_embeddings else None
    if head is not None:
        embedding = tensors.get("model.embed_tokens.weight")
        if embedding is not None and not torch.equal(head, embedding):
            raise ValueError(
                f"{source}: lm_head.weight differs from model.embed_tokens.weight, but config.json says "
                "tie_word_embeddings=true. Set it to false to keep both."
            )
        del tensors["lm_head.weight"]
    check_tensors({name: shapes[ours] for name, ours in theirs.items()}, tensors, source)
    return {theirs[name]: tensor for name, tensor in tensors.items()}


def check_tensors(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise ``ValueError`` unless ``tensors`` are whole and have exactly these names and shapes."""
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise ValueError(f"{source} lacks {_listed(missing)}.")
    if unexpected := sorted(tensors.keys() - shapes.keys()):
        raise ValueError(f"{source} has {_listed(unexpected)}, which this shape of model does not have.")
    for name, shape in shapes.items():
        if hasattr(tensors[name], "full_tensor"):
            raise ValueError(f"{source}: {name} is sharded. Gather whole tensors first.")
        if tensors[name].shape != shape:
            raise ValueError(f"{source}: {name} is {list(tensors[name].shape)}, but must be {list(shape)}.")


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
