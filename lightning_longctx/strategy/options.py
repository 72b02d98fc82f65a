"""What the strategy's options mean for batches, checked before anything starts."""

from __future__ import annotations

from typing import Any

from lightning_longctx.batch import LayoutOption, Sharding
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.mask import Mask
from lightning_longctx.topology import Degrees


def sharding_of_options(
    layout: LayoutOption,
    backend: str,
    communication: Communication,
    sequence_dims: dict[str, int | None] | None,
    pad_values: dict[str, int] | None,
) -> Sharding:
    """How batches are cut, as far as the options say; see ``places.sharding_of_rank`` for the rest.

    Raises:
        ValueError: An option is wrong.
    """
    dims, pads = tuple((sequence_dims or {}).items()), tuple((pad_values or {}).items())
    return Sharding(layout, backend=backend, sequence_dims=dims, pad_values=pads, links=communication.links)


def declared_masks(module: Any) -> tuple[Mask, ...]:
    """The masks that a module declares as ``attention_masks``; plain causal if it does not.

    Raises:
        ValueError: They are no masks.
    """
    masks = getattr(module, "attention_masks", (Mask(),))
    if not isinstance(masks, list | tuple) or not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise ValueError(
            f"attention_masks={masks!r} of {type(module).__name__} must be a tuple of lightning_longctx.plan.mask.Mask,"
            " such as (Mask(window=1024), Mask()). Correct it, or leave it out for causal attention."
        )
    return tuple(masks)


def check_heads(module: Any, degrees: Degrees) -> None:
    """Check the heads that a module declares as ``attention_heads``, ``(query heads, key/value heads)``, if it does.

    Raises:
        ValueError: The degrees do not fit them.
    """
    if (heads := getattr(module, "attention_heads", None)) is not None:
        degrees.check_heads(*heads)
