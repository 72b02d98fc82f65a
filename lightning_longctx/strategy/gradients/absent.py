"""Losses of ranks that hold no token that counts: 0/0, which must become 0 and stay in the graph."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

ARITHMETIC = re.compile(
    "(Add|Div|Mul|Neg|Sub|ToCopy|Sum|Mean|Squeeze|Unsqueeze|View|ReshapeAlias|Expand|Where|Clone|Stack|Cat|Dot)Backward"
)
"""What stands between a loss and the losses of tokens it is made of."""


def zero_if_absent(loss: Tensor, count: Tensor) -> Tensor:
    """The loss, or 0 with zero gradients where ``count`` is 0.

    A zero gradient alone does not do: that of a mean over nothing, ``sum / count``, is 0/0 again. It is stopped at the
    arithmetic on sums, so that what lies before gets zeros: other ranks wait for this backward and send gradients of
    keys and values through it.

    Args:
        loss: A scalar.
        count: How many tokens it is a mean over; never looked at on the host.
    """
    seen: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen or not ARITHMETIC.match(node.name()):
            continue
        seen.add(node)
        node.register_hook(partial(_stop, count))
        ahead += [following for following, _ in node.next_functions]
    return torch.where(count > 0, loss, torch.zeros_like(loss))


def _stop(count: Tensor, grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.where(count > 0, grad, torch.zeros_like(grad)) for grad in grads)
