"""The leaves of the decoder, which own its parameters (but for sinks) and know their own initialisation.

``reset_parameters`` gives the documented start on any device, so that a model built on the meta device and made real
with ``to_empty`` starts like one that was built in place, draw for draw.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A matrix without bias, drawn from a normal distribution.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        std: Standard deviation of the initial weights.
    """

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """One vector per token id, drawn from a normal distribution.

    Args:
        num_embeddings: Number of token ids.
        embedding_dim: Width of a vector.
        std: Standard deviation of the initial weights.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the vectors anew."""
        nn.init.normal_(self.weight, std=self.std)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dim (arXiv 1910.07467).

    Computed in float32 for narrower inputs; the result has the input's dtype.

    Args:
        width: Size of the last dim.
        eps: Added to the mean square.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to 1."""
        nn.init.ones_(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        """Normalise ``states`` [..., width]."""
        return F.rms_norm(states, self.weight.shape, self.weight, self.eps)
