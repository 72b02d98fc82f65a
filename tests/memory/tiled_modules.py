"""What the tests of tiles share: modules that treat every token alone, and their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

LENGTH, WIDTH = 13, 8


class GatedMLP(nn.Module):
    """Counts its calls."""

    def __init__(self, width: int = WIDTH, wide: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, wide), nn.Linear(width, wide), nn.Linear(wide, width)
        self.dropout = nn.Dropout(dropout)
        self.calls: list[int] = []

    def forward(self, states: Tensor) -> Tensor:
        self.calls.append(states.shape[1])
        return self.dropout(self.down(F.silu(self.gate(states)) * self.up(states)))


class Block(nn.Module):
    """What saves tensors comes first, as in a pre-norm layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), GatedMLP(**options)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.mlp(self.norm(states))


def seeded(make: Callable[[], nn.Module] = GatedMLP, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return make().to(dtype)


def inputs(dtype: torch.dtype = torch.float64, length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def numbers(module: nn.Module, states: Tensor, needs_input: bool = True) -> dict[str, Tensor]:
    """Output and gradients of a loss that treats all of it unlike."""
    module.zero_grad()
    states = states.clone().requires_grad_(needs_input)
    result = module(states)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).to(result.dtype)
    (result * weights).sum().backward()
    found = {"result": result.detach(), **({"input": states.grad} if needs_input else {})}
    return found | {name: one.grad for name, one in module.named_parameters() if one.grad is not None}  # type: ignore


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, one in expected.items():
        assert actual[name].dtype == one.dtype
        difference = (actual[name] - one).abs().max()
        assert difference <= tolerance * max(1.0, float(one.abs().max())), f"{name} differs by {difference:.3g}"
