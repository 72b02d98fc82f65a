"""A metric that is exact over batches, data loaders' ends and ranks: it keeps sums and divides once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torchmetrics import Metric


class TokenMean(Metric):
    """Mean over tokens, from sums and counts in float64.

    Args:
        group: Ranks that hold different tokens; the sums are added over them. ``None`` is the world.
        exponentiate: Report ``exp(mean)``: of a cross entropy, the perplexity.
    """

    full_state_update = False
    higher_is_better = False
    sums: Tensor

    def __init__(self, group: ProcessGroup | None = None, exponentiate: bool = False) -> None:
        super().__init__(process_group=group)
        self.exponentiate = exponentiate
        # Both in one tensor, so that ranks exchange one message.
        self.add_state("sums", default=torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add a sum over ``count`` tokens."""
        self.sums += torch.stack([total.detach().double(), count.detach().double()])

    def compute(self) -> Tensor:
        """The mean, a float32 scalar; NaN if there was no token."""
        mean = self.sums[0] / self.sums[1]
        return (mean.exp() if self.exponentiate else mean).float()
