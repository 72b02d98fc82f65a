"""Rotary positions of Hugging Face models, where a shard or a narrow dtype would change them.

Some types of frequencies depend on the length of the sequence. Transformers takes the largest position it is given,
plus one, for that length; a shard has other positions than the sequence, and padding has positions too. So a rotary
module of such a type gets one more position behind the shard's own, the last one of the longest row, and what comes out
for it is dropped again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_longctx.models.hugging_face.masks import Sequences

Module = TypeVar("Module", bound=nn.Module)

_BY_LENGTH = ("dynamic", "longrope")
_FREQUENCIES = "inv_freq"
"""How the buffers are called, or how their names end."""


def length_dependent(model: nn.Module) -> Iterator[nn.Module]:
    """Rotary modules whose frequencies depend on the length."""
    for part in model.modules():
        kinds: Any = getattr(part, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(name, str) and name.startswith(_BY_LENGTH) for name in names):
            yield part


def see_whole_length(part: nn.Module, sequences: Sequences) -> tuple[Any, Any]:
    """Let a rotary module go by the whole sequence's length; returns handles whose ``remove`` ends that."""
    before = part.register_forward_pre_hook(partial(_append_last, sequences), with_kwargs=True)
    return before, part.register_forward_hook(_drop_last)


def _append_last(
    sequences: Sequences, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    record = sequences.current or sequences.fitting(positions.shape[-1])
    if not record.row_lengths:
        raise ValueError(
            f"{type(part).__name__} scales rotary positions by the length of whole rows, and the batch's sequence "
            "record does not know it. Give position_ids of shape [B, S], or another rope_type."
        )
    last = max(record.row_lengths) - 1
    longer = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last)], dim=-1)
    longer = longer.clamp(max=last)  # padding counts on beyond it
    if "position_ids" in kwargs:
        return args, kwargs | {"position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def _drop_last(part: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(angles[..., :-1, :] for angles in output)


def exact_frequencies(convert: Callable[[Module], Module]) -> Callable[[Module], Module]:
    """Let a conversion of a module to another dtype leave rotary frequencies as they are.

    Rounded to bfloat16, a frequency is off by up to one part in 256: at position 100,000 that is hundreds of radians.
    """

    def converted(module: Module) -> Module:
        kept = [
            (part, name, buffer)
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
            if name.endswith(_FREQUENCIES) and buffer.is_floating_point()
        ]
        result = convert(module)
        for part, name, buffer in kept:
            setattr(part, name, buffer.to(getattr(part, name).device))
        return result

    return converted
