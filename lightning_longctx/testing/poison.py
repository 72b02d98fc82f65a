"""Fill uninitialised memory with NaN, so that reading it is seen.

Why functions are replaced, and not ``torch.utils.deterministic.fill_uninitialized_memory``: that acts only in
deterministic mode, which changes the kernels under test, refuses some operations, is switched by
``Trainer(deterministic=...)`` and fills integers too. A ``TorchDispatchMode`` belongs to one thread (autograd has its
own) and competes with the modes of selective checkpointing. Replaced functions hold for every thread and for forked
DataLoader workers. Memory that C++ code allocates for itself stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FUNCTIONS = (
    (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
    (torch.Tensor, ("new_empty", "new_empty_strided")),
)


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Make ``torch.empty`` and its relatives return NaN in floating and complex dtypes; integers and bools stay."""
    with torch.device("cpu"):
        # `with torch.device(...)` keeps a set of the constructors it redirects, looked up by name at its first use: let
        # it find the original functions, which are what it will see called.
        torch.empty(0)
    originals = [(owner, name, getattr(owner, name)) for owner, names in _FUNCTIONS for name in names]
    for owner, name, original in originals:
        setattr(owner, name, _poisoned(original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        if tensor.is_floating_point() or tensor.is_complex():
            with torch.no_grad():  # a leaf that requires gradients takes no in-place operation otherwise
                tensor.fill_(float("nan"))
        return tensor

    return empty
