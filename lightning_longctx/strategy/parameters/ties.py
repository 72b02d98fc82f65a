"""Parameters that have two names: what replaces parameters one by one takes them apart."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.tensor import DTensor

Place = tuple[nn.Module, str]
Ties = list[tuple[Place, Place]]
"""Places of a parameter beyond its first, each with the first."""


def tied_parameters(module: nn.Module) -> Ties:
    """All ties in a module."""
    first: dict[int, Place] = {}
    ties = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            place = (part, name)
            owner = first.setdefault(id(parameter), place)
            if owner is not place and owner != place:
                ties.append((place, cast("Place", owner)))
    return ties


def tie_again(ties: Ties) -> None:
    """Give every place the parameter that its first place has now.

    Raises:
        ValueError: They have been distributed in unlike ways.
    """
    for (part, name), (owner, owned) in ties:
        here, first = getattr(part, name), getattr(owner, owned)
        if _placed(here) != _placed(first):
            raise ValueError(
                f"{name} of {type(part).__name__} and {owned} of {type(owner).__name__} are one parameter, but the "
                f"tensor plan cuts one {_placed(first) or 'not at all'} and the other {_placed(here) or 'not at all'}. "
                "Name both in the plan, and cut them alike."
            )
        setattr(part, name, first)


def _placed(parameter: object) -> object:
    return parameter.placements if isinstance(parameter, DTensor) else None
