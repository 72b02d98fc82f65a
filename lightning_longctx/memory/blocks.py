"""The repeated blocks of a model: what is distributed, and run again in backward, by itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn


def named_blocks(module: nn.Module, patterns: tuple[str, ...] | None = None) -> dict[str, nn.Module]:
    """Blocks by name, in the order in which the module lists them.

    Args:
        module: The whole one.
        patterns: Names, in which ``*`` stands for one part of a name; None takes ``repeated_blocks``.

    Raises:
        ValueError: A pattern names no submodule, or one block is inside of another.
    """
    if patterns is None:
        names = {id(part): name for name, part in reversed(list(module.named_modules()))}
        return {names[id(block)]: block for block in repeated_blocks(module)}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        fits = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*"))).fullmatch
        matching = {name: part for name, part in module.named_modules() if name and fits(name)}
        if not matching:
            alone = list(named_blocks(module))
            hint = f" Left out, it finds {alone[0]} to {alone[-1]}." if alone else ""
            raise ValueError(
                f"checkpointing.blocks names {pattern!r}, but {type(module).__name__} has no submodule called so. "
                f"Correct the name; * stands for one part of it.{hint}"
            )
        found |= matching
    for name in found:
        if outer := next((other for other in found if name.startswith(other + ".")), None):
            raise ValueError(f"checkpointing.blocks names {name} and {outer} around it. Name one of them.")
    return {name: part for name, part in module.named_modules() if name in found}


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Parts worth distributing by themselves: layers of a stack, so that one travels while another computes.

    They are the members of an ``nn.ModuleList``, or of an ``nn.Sequential`` of modules with parts, that has at least
    two, all of one class; outermost ones count.
    A block that shares parameters with the rest of the module stays with the rest.
    """
    blocks = list(dict.fromkeys(_find_blocks(module)))
    listed = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    everywhere = _places(module)
    return [block for block in blocks if not _shares(block, listed[id(block)], everywhere)]


def _find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        containers = any(isinstance(member, nn.ModuleList | nn.ModuleDict) for member in members)  # cannot be called
        # Layers of a Sequential that have no parts are steps of one block, such as Linear, Linear.
        whole = isinstance(child, nn.ModuleList) or all(list(member.children()) for member in members)
        if len(members) > 1 and len(set(map(type, members))) == 1 and not containers and whole:
            yield from members
        else:
            yield from _find_blocks(child)


def _shares(block: nn.Module, times: int, everywhere: Counter[int]) -> bool:
    """Whether a parameter of the block, or a module in it, is elsewhere too; the block itself is listed ``times``."""
    return any(everywhere[parameter] > count * times for parameter, count in _places(block).items())


def _places(module: nn.Module) -> Counter[int]:
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    return Counter(id(parameter) for part in parts for parameter in part.parameters(recurse=False))
