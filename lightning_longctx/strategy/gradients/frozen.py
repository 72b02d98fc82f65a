"""Parameters that are frozen during a step, as by ``toggle_optimizer``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_longctx._upstream import sharded_parameters


@contextmanager
def keeping_frozen_gradients(module: nn.Module) -> Iterator[None]:
    """A backward inside leaves the gradients of frozen parameters as they are.

    The root's parameters are gathered for the whole step; what is frozen within it is no longer asked in the graph.

    Args:
        module: Distributed.
    """
    frozen = [parameter for parameter in sharded_parameters(module) if not parameter.requires_grad]
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in frozen]
    yield
    for parameter, gradient in zip(frozen, before, strict=True):
        parameter.grad = gradient
