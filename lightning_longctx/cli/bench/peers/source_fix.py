"""Peers in float32: two of them overwrite what they have already summed."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

_ALIASES, _COPIES = "_buffer.to(torch.float32)", "_buffer.to(torch.float32, copy=True)"


def with_own_sums(name: str) -> ModuleType:
    """Import a module whose first sum must be a copy of its scratch buffer.

    flash-attn has no float32, so authors never met that ``buffer.to(torch.float32)`` is the buffer itself then, which
    the next step overwrites. Without this, gradients of these peers are wrong, and nothing could be compared. A version
    that does not have the line stays as it is.

    Args:
        name: Of the module.
    """
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    if _ALIASES in source:
        exec(compile(source.replace(_ALIASES, _COPIES), inspect.getfile(module), "exec"), vars(module))
    return module
