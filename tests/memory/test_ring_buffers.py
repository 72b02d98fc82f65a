"""Memory for what a ring receives serves all layers, whatever backward keeps or runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_longctx.attention import attend
from lightning_longctx.attention.rings import find_ring
from tests.attention.ring_calls import opened, selective

WAYS: dict[str, dict[str, Any]] = {"none": {}, "full": {}, "selective": {"context_fn": selective}}


def bytes_of_buffers(num_layers: int, how: str) -> tuple[int, int]:
    """What waits in the ring's buffers after three steps, and the most that was in use at one time."""
    with opened(dict(context=2), length=64) as record:
        buffers = find_ring(record.ring).buffers  # type: ignore[union-attr]

        def block(states: Tensor) -> Tensor:
            return states + attend(states, states, states, sequence=record) * 2

        for step in range(3):
            torch.manual_seed(step)
            states = torch.randn(1, 2, 32, 8, requires_grad=True)
            for _ in range(num_layers):
                states = block(states) if how == "none" else checkpoint(block, states, use_reentrant=False, **WAYS[how])
            states.sum().backward()
        assert buffers._lent == {}
        return buffers._free_bytes, buffers._most_lent_bytes


@pytest.mark.parametrize("how", list(WAYS))
def test_more_layers_need_no_more_buffers(gloo: Any, how: str) -> None:
    few, many = (gloo(2).run(bytes_of_buffers, num_layers, how) for num_layers in (1, 6))
    assert few == many and all(0 < free <= most for free, most in few)
