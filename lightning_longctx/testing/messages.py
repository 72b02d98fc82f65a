"""What a pool and its ranks say to each other: plain frozen values, pickled."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class World:
    """One gloo world to be forked.

    Args:
        num_ranks: Processes.
        store_port: Port on 127.0.0.1 of the key-value store that the process group meets at.
        main_port: A free port, for ``MASTER_PORT``: nothing listens there unless a test starts it.
        logs: For each rank the file that its stdout and stderr go to.
        poison_empty: Fill what ``torch.empty`` returns with NaN (see ``poison``).
    """

    num_ranks: int
    store_port: int
    main_port: int
    logs: tuple[str, ...]
    poison_empty: bool = False

    def environment(self, rank: int) -> dict[str, str]:
        """The variables from which Lightning and torch learn that ``rank`` was launched already."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.main_port),
        }


@dataclass(frozen=True)
class Call:
    """A function to run on every rank, by reference, with its arguments by value."""

    module: str
    file: str | None
    search_path: tuple[str, ...]
    directory: str
    payload: bytes

    @staticmethod
    def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Pickle a call together with what another process needs to import ``fn``.

        Raises:
            ValueError: ``fn`` or an argument can't be pickled.
        """
        inner = fn
        while isinstance(inner, partial):
            inner = inner.func
        try:
            payload = pickle.dumps((fn, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{inner!r} or its arguments can't be sent to the ranks ({error}). Define the function at the top "
                "level of an importable module and pass values that pickle."
            ) from error
        name = getattr(inner, "__module__", "builtins") or "builtins"
        file = getattr(sys.modules.get(name), "__file__", None)
        return Call(name, file and os.path.abspath(file), tuple(sys.path), os.getcwd(), payload)

    def unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Import the function's module as the sender did, and load the call."""
        sys.path.extend(path for path in self.search_path if path not in sys.path)
        if self.module not in sys.modules:
            _import(self.module, self.file)
        return pickle.loads(self.payload)


@dataclass(frozen=True)
class Reply:
    """One rank's answer to a call.

    Args:
        payload: The pickled result.
        error: Traceback text; empty if the call returned.
        summary: Last line of the error, ``Type: message``.
        intact: Whether the default process group is still the pool's.
        num_handles: Open files and threads of the rank, where the system can count them: process groups that calls
            left behind hold some of each.
    """

    payload: bytes = b""
    error: str = ""
    summary: str = ""
    intact: bool = True
    num_handles: int = 0

    @property
    def value(self) -> Any:
        """The result."""
        return pickle.loads(self.payload)


def _import(name: str, file: str | None) -> None:
    """Import by name; a test module that no search path leads to is loaded from its file under the same name."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing_itself = error.name is not None and (name == error.name or name.startswith(error.name + "."))
        if file is None or not missing_itself:
            raise
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
