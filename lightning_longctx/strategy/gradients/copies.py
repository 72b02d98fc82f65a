"""Parameters that tensor ranks hold copies of, and parameters that a rank does not use: what ranks tell each other.

Pure, but for ``copied_norms``, which looks at gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longctx.strategy.gradients.norms import message_device, own_part

TOLERANCE = 1e-3
"""How far squared norms of copies may be apart, relatively: kernels may round differently, sums over parts are far."""

_BITS = 48
"""Of a float64, which holds integers up to 2^53 exactly."""


def packed(flags: Sequence[bool]) -> list[float]:
    """Flags as few numbers, for a message of floats."""
    words = [0] * -(-len(flags) // _BITS)
    for index, flag in enumerate(flags):
        words[index // _BITS] |= int(flag) << (index % _BITS)
    return [float(word) for word in words]


def is_packed(words: Sequence[float], index: int) -> bool:
    """The flag of that index."""
    return bool(int(words[index // _BITS]) >> (index % _BITS) & 1)


def in_all(rows: Sequence[Sequence[float]]) -> list[float]:
    """The flags that all rows of packed ones have."""
    return [float(reduce(and_, map(int, words))) for words in zip(*rows, strict=True)]


def unlike(norms: Sequence[float], num_tensor_ranks: int) -> bool:
    """Whether squared norms, by rank, differ among neighbouring tensor ranks."""
    groups = (norms[start : start + num_tensor_ranks] for start in range(0, len(norms), num_tensor_ranks))
    return any(max(group) - min(group) > TOLERANCE * max(group) for group in groups)


@torch.no_grad()
def copied_norms(parameters: Sequence[Tensor]) -> Tensor:
    """Squared norms of the parts of gradients that a rank holds, [len(parameters)] float64; 0 where tensor ranks share.

    Args:
        parameters: In the same order on all ranks.
    """
    device = message_device(parameters)
    norms = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None and not _is_shared(parameter.grad):
            part, _ = own_part(parameter.grad, 1)
            norms[index] = part.to(torch.promote_types(part.dtype, torch.float32)).norm().double().square().to(device)
    return norms


def _is_shared(gradient: Tensor) -> bool:
    """Whether tensor ranks hold unlike parts of it."""
    if not isinstance(gradient, DTensor) or "tensor" not in (names := gradient.device_mesh.mesh_dim_names or ()):
        return False
    return not gradient.placements[names.index("tensor")].is_replicate()
