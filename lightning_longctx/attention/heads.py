"""Head parallelism (Ulysses, arXiv 2309.14509): which heads a head rank attends with, and what it sends for them.

Each of U head ranks holds a part of a context rank's tokens, with all heads. Before attention they trade tokens for
heads, after it heads for tokens. Here is what goes to whom, without anybody to talk to; ``exchange`` sends it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from lightning_longctx.attention.buffers import Buffers
from lightning_longctx.topology.degrees import check_head_degree

Shapes = Sequence[Sequence[int]]


def local_heads(num_heads: int, num_kv_heads: int, degree: int, head_rank: int) -> tuple[range, range]:
    """Query heads and key/value heads of one head rank; key/value heads fewer than ranks are shared by neighbours.

    Raises:
        ValueError: The degree does not fit the heads.
    """
    check_head_degree("head", degree, num_heads, num_kv_heads, replicate=True)
    size, first = num_heads // degree, head_rank * num_kv_heads // degree
    return range(head_rank * size, (head_rank + 1) * size), range(first, first + held_heads(num_kv_heads, degree))


def local_sinks(sinks: Tensor, degree: int, head_rank: int) -> Tensor:
    """The entries [Hq / U] of a per-head parameter [Hq] for one head rank's query heads."""
    size = sinks.shape[0] // degree
    return sinks[head_rank * size : (head_rank + 1) * size]


def held_heads(num_heads: int, degree: int) -> int:
    """How many of ``num_heads`` each head rank gets: an even part, or a copy of one where ranks outnumber heads."""
    return max(1, num_heads // degree)


def pack_heads(tensors: Sequence[Tensor], degree: int, buffers: Buffers) -> Tensor:
    """What every head rank gets of this one's tensors: its heads of all of them, for one all-to-all.

    Args:
        tensors: Each [B, H, t, D], of any strides; H is a multiple of U, or divides it: then heads are copied.
        degree: Head ranks U.
        buffers: Where the result comes from.

    Returns:
        [U, n], contiguous: row u is for head rank u.
    """
    pieces = []
    for tensor in tensors:
        groups, copies, size = _groups(tensor.shape[1], degree)
        grouped = tensor.unflatten(1, (groups, size)).permute(1, 0, 3, 2, 4)  # [groups, B, t, size, D]
        pieces.append(grouped.unsqueeze(1).expand(-1, copies, -1, -1, -1, -1))
    return _packed(pieces, degree, buffers)


def unpack_tokens(received: Tensor, shapes: Shapes) -> list[Tensor]:
    """The other end of ``pack_heads``: this rank's heads of all head ranks' tokens, which follow in rank order.

    Args:
        received: [U, n]: row u comes from head rank u.
        shapes: [B, H, t, D] of what went into ``pack_heads``; the same on all head ranks.

    Returns:
        [B, max(H / U, 1), U * t, D] each, fresh and token-major in memory.
    """
    degree = received.shape[0]
    pieces = [(degree, batch, tokens, held_heads(heads, degree), width) for batch, heads, tokens, width in shapes]
    # Samples come first again, [B, U, t, h, D], so that each keeps its own tokens.
    return [_copied(room.permute(1, 0, 2, 3, 4)).flatten(1, 2).transpose(1, 2) for room in _rooms(received, pieces)]


def pack_tokens(tensors: Sequence[Tensor], degree: int, buffers: Buffers) -> Tensor:
    """What every head rank gets of tensors [B, h, U * t, D]: its t tokens of all of them. [U, n] as ``pack_heads``."""
    cut = (tensor.unflatten(2, (degree, tensor.shape[2] // degree)) for tensor in tensors)
    return _packed([tensor.permute(2, 0, 3, 1, 4) for tensor in cut], degree, buffers)  # [U, B, t, h, D]


def unpack_heads(received: Tensor, shapes: Shapes) -> list[Tensor]:
    """The other end of ``pack_tokens``: all heads of this rank's tokens. What comes for one head is summed, wide.

    Args:
        received: [U, n]: row u comes from head rank u.
        shapes: [B, H, t, D] of the results.

    Returns:
        [B, H, t, D] each, fresh and token-major in memory.
    """
    pieces = []
    for batch, heads, tokens, width in shapes:
        groups, copies, size = _groups(heads, received.shape[0])
        pieces.append((groups, copies, batch, tokens, size, width))
    results = []
    for room in _rooms(received, pieces):
        summed = room.sum(1) if room.shape[1] > 1 else room[:, 0]  # torch sums narrow dtypes in float32
        by_token = summed.permute(1, 2, 0, 3, 4)  # [B, t, groups, size, D]
        results.append(_copied(by_token).flatten(2, 3).transpose(1, 2))
    return results


def _groups(num_heads: int, degree: int) -> tuple[int, int, int]:
    """Groups of ``size`` heads each, and how many neighbouring ranks get a copy of each group."""
    copies = max(1, degree // num_heads)
    return degree // copies, copies, held_heads(num_heads, degree)


def _packed(pieces: Sequence[Tensor], degree: int, buffers: Buffers) -> Tensor:
    """Pieces whose leading dims count the ranks, side by side in one row per rank; each is copied once."""
    sizes = [piece.numel() // degree for piece in pieces]
    packed = buffers.take((degree, sum(sizes)), pieces[0].dtype, pieces[0].device)
    for piece, room in zip(pieces, packed.split(sizes, dim=1), strict=True):
        room.view(piece.shape).copy_(piece)
    return packed


def _rooms(received: Tensor, pieces: Shapes) -> list[Tensor]:
    """Views of those shapes into the rows of ``received``."""
    sizes = [math.prod(piece) // received.shape[0] for piece in pieces]
    return [room.view(*piece) for room, piece in zip(received.split(sizes, dim=1), pieces, strict=True)]


def _copied(tensor: Tensor) -> Tensor:
    """A contiguous copy, always: ``contiguous`` and ``reshape`` may return the buffer itself."""
    return tensor.new_empty(tensor.shape).copy_(tensor)
