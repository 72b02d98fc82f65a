"""How many ranks each parallel axis has: the one dial of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

AXES = ("data", "context_outer", "context_inner", "head", "tensor")
"""Names of the mesh axes. ``Degrees.axes`` puts them in the order in which global ranks count."""

Placement = Literal["head_first", "context_first"]
_AXES_BY_PLACEMENT = {"head_first": AXES, "context_first": ("data", "head", "context_outer", "context_inner", "tensor")}


@dataclass(frozen=True)
class Degrees:
    """Number of ranks on every parallel axis (LoongTrain's names).

    Args:
        data: Ranks that read different samples. ``auto`` takes what the other degrees leave of the world.
        context: Ranks that share one sequence; attention travels between them in a ring.
        inner_ring: Ranks of one inner ring of DoubleRing attention; must divide ``context``. Set it to the number of
            context ranks on a node. ``null`` is one flat ring of all context ranks.
        head: Ranks that share attention heads (Ulysses): around attention they trade tokens for heads, all with all.
            Together with ``context`` they share one sequence. Must divide the query heads, and divide the key/value
            heads or be a multiple of them.
        tensor: Ranks that share every weight matrix (Megatron), with the same tokens of the same samples. Must divide
            query heads and key/value heads, and the module must have a plan (``tensor_parallel_plan``): ``CausalLM``
            and most Hugging Face models do. Neighbours, for they exchange most: keep them on one node.
        placement: Which ranks are neighbours, and so on one node: ``head_first`` those of a head group, with the ring
            going across; ``context_first`` those of a ring. The same if ``head`` or ``context`` is 1.

    Raises:
        ValueError: A degree is not a positive integer, ``inner_ring`` does not divide ``context``, or the placement is
            unknown.
    """

    data: int | Literal["auto"] = "auto"
    context: int = 1
    inner_ring: int | None = None
    head: int = 1
    tensor: int = 1
    placement: Placement = "head_first"

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placement):
            raise ValueError(f"placement={self.placement!r} is unknown; choose one of {list(get_args(Placement))}.")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "placement" or (field.name, value) in (("data", "auto"), ("inner_ring", None)):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name}={value!r} must be a positive integer.")
        if self.context % self.inner:
            raise ValueError(
                f"inner_ring={self.inner_ring} does not divide context={self.context}: a ring of rings needs whole "
                f"inner rings. Use one of {divisors(self.context)}, or null for one flat ring."
            )

    @property
    def inner(self) -> int:
        """Ranks in one inner ring (a *window* of the double ring)."""
        return self.context if self.inner_ring is None else self.inner_ring

    @property
    def windows(self) -> int:
        """Number of inner rings."""
        return self.context // self.inner

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, slowest first: global ranks count along the last one, then along the one before it."""
        return _AXES_BY_PLACEMENT[self.placement]

    @property
    def shape(self) -> tuple[int, ...]:
        """Mesh shape in the order of ``axes``, data first; needs a resolved ``data``."""
        if self.data == "auto":
            raise ValueError("data='auto' has no size yet: call resolve(world_size) first.")
        sizes = (self.data, self.windows, self.inner, self.head, self.tensor)
        return tuple(sizes[AXES.index(axis)] for axis in self.axes)

    def resolve(self, world_size: int) -> Degrees:
        """Fill in ``data`` and check that the degrees multiply to ``world_size``.

        Raises:
            ValueError: They do not.
        """
        group = self.context * self.head * self.tensor
        named = f"context={self.context} x head={self.head} x tensor={self.tensor}"
        if self.data == "auto":
            if world_size % group:
                raise ValueError(
                    f"{named} = {group} does not divide the {world_size} processes of this run. Start a multiple of "
                    f"{group} processes (trainer.devices x trainer.num_nodes), or change the degrees."
                )
            return replace(self, data=world_size // group)
        if self.data * group != world_size:
            fits = world_size % group == 0
            raise ValueError(
                f"data={self.data} x {named} = {self.data * group}, but this run has {world_size} processes "
                f"(trainer.devices x trainer.num_nodes). {'Use data=auto' if fits else 'Lower the other degrees'}, or "
                f"start {self.data * group} processes."
            )
        return self

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Check that attention heads fit ``head`` and ``tensor``.

        Raises:
            ValueError: They do not; the message names the option and the values that fit.
        """
        check_head_degree("tensor", self.tensor, num_heads, num_kv_heads, replicate=False)
        check_head_degree("head", self.head, num_heads // self.tensor, num_kv_heads // self.tensor, replicate=True)


def check_head_degree(option: str, degree: int, num_heads: int, num_kv_heads: int, *, replicate: bool) -> None:
    """Raise ``ValueError`` unless ``degree`` ranks can share the heads.

    Key/value heads must divide evenly or, where ``replicate`` allows copies, be divided by the degree evenly.
    """

    def fits(ranks: int) -> bool:
        whole = num_kv_heads % ranks == 0
        copies = replicate and ranks % num_kv_heads == 0
        return num_heads % ranks == 0 and (whole or copies)

    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}.")
    if not fits(degree):
        allowed = " or ".join(str(ranks) for ranks in divisors(num_heads) if fits(ranks))
        rule = f"divide {num_heads}, and divide {num_kv_heads} or be a multiple of it" if replicate else "divide both"
        raise ValueError(
            f"{option}={degree} does not fit {num_heads} query heads and {num_kv_heads} key/value heads: it must "
            f"{rule}. Use {option}={allowed}."
        )


def divisors(number: int) -> list[int]:
    """Divisors of a positive integer, ascending."""
    return sorted({d for i in range(1, math.isqrt(number) + 1) if number % i == 0 for d in (i, number // i)})
