"""What stands in front of a loader and lets everything but its own work pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class LoaderAround:
    """Iterates in its own way over a loader; everything else is looked up in, and set on, the loader itself.

    Args:
        loader: Any iterable of batches.
        own: Values of this object, by name.
    """

    _own: frozenset[str] = frozenset({"loader", "state_dict", "load_state_dict"})

    def __init__(self, loader: Any, **own: Any) -> None:
        vars(self).update(own, loader=loader, _own=LoaderAround._own | own.keys())
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            # Lightning saves loaders that have both, and since Python 3.12 its check does not see __getattr__.
            vars(self).update(state_dict=loader.state_dict, load_state_dict=loader.load_state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name in vars(self).get("_own", LoaderAround._own):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning resets a loader's iterator by assignment: that must reach the one who owns the workers.
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def innermost(loader: Any) -> Any:
    """The loader itself, without what stands in front of it."""
    while isinstance(loader, LoaderAround):
        loader = loader.loader
    return loader
