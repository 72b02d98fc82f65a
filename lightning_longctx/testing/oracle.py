"""The slow truth: plain masked softmax attention in one process, and the way between whole tensors and shards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_longctx.sequence import Ranges


def attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Softmax attention as the formula reads, in the dtype of its inputs; autograd gives the gradients.

    Args:
        q: Queries ``[B, Hq, Tq, D]``.
        k: Keys ``[B, Hkv, Tk, D]``; query head h reads key head ``h // (Hq // Hkv)``.
        v: Values ``[B, Hkv, Tk, Dv]``.
        mask: Bool, broadcastable to ``[B, Hq, Tq, Tk]``; True where a query sees a key. None is causal.
        scale: Factor on the scores; None is ``D ** -0.5``.
        sinks: ``[Hq]``, one more logit per query head, of a key that every query sees and whose value is 0.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        keep: Bool ``[B, Hq, Tq, Tk]``, the weights that dropout leaves, ``1 / (1 - dropout_p)`` times as large.
        dropout_p: Probability with which ``keep`` was drawn.

    Returns:
        ``out [B, Hq, Tq, Dv]`` and ``lse [B, Hq, Tq]``, the log of the sum of exponentials, the sink's among them. A
        query that sees no key has out 0, without a sink lse -inf, and passes no gradient on.

    Raises:
        ValueError: Heads that don't divide, or a causal mask for unequal lengths.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads can't be grouped over {k.shape[1]} key/value heads.")
    if mask is None:
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"causal for {q.shape[2]} queries and {k.shape[2]} keys is ambiguous; pass a mask.")
        mask = dense_mask(q.shape[2]).to(q.device)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -math.inf)
    blind = ~mask.any(-1).broadcast_to(scores.shape[:-1])
    if sinks is not None:
        logits = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores, v = torch.cat([scores, logits], -1), F.pad(v, (0, 0, 0, 1))
        blind = torch.zeros_like(blind)
    # The maximum cancels out of both results, so it needs no gradient; 0 keeps blind rows free of inf - inf.
    highest = scores.detach().amax(-1).masked_fill(blind, 0.0)
    weights = (scores - highest[..., None]).exp()
    total = weights.sum(-1).masked_fill(blind, 1.0)
    weights = weights / total[..., None]
    if keep is not None:
        keep = keep if sinks is None else F.pad(keep, (0, 1), value=False)  # the sink has no value to lose
        weights = weights * keep / (1.0 - dropout_p)
    out = weights @ v
    lse = (total.log() + highest).masked_fill(blind, -math.inf)
    return out, lse


def dense_mask(
    length: int, causal: bool = True, window: int | None = None, documents: Sequence[int] | None = None
) -> Tensor:
    """Which keys each query sees, as a bool tensor ``[length, length]`` (query, key).

    Args:
        length: Tokens.
        causal: A query sees no later key.
        window: Keys a query sees at most, itself counted.
        documents: Token counts of the packed documents, in order; no query sees another document's keys.

    Raises:
        ValueError: A window that is not causal or below 1, or documents that don't add up to the length.
    """
    index = torch.arange(length)
    offset = index[None, :] - index[:, None]
    mask = offset <= 0 if causal else torch.ones(length, length, dtype=torch.bool)
    if window is not None:
        if not causal or window < 1:
            raise ValueError(f"window={window} counts the query and keys before it: needs causal=True and at least 1.")
        mask = mask & (offset > -window)
    if documents is not None:
        if sum(documents) != length:
            raise ValueError(f"documents={list(documents)} hold {sum(documents)} tokens, not length={length}.")
        ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents, dtype=torch.int64))
        mask = mask & (ids[:, None] == ids[None, :])
    return mask


def take_shard(tensor: Tensor, ranges: Ranges, dim: int) -> Tensor:
    """A rank's slice of a whole tensor: the positions in ``ranges``, in that order, along ``dim``."""
    return tensor.index_select(dim, _positions([ranges]).to(tensor.device))


def gather_shards(shards: Sequence[Tensor], all_ranges: Sequence[Ranges], dim: int) -> Tensor:
    """The whole tensor from every rank's shard: inverse of ``take_shard``, differentiable.

    Raises:
        ValueError: Ranges that don't cover 0 ... n-1 exactly once.
    """
    positions = _positions(all_ranges)
    order = positions.argsort()
    if not torch.equal(positions[order], torch.arange(len(positions))):
        raise ValueError(f"the ranges {list(all_ranges)} don't cover 0 ... {len(positions) - 1} exactly once.")
    return torch.cat(list(shards), dim).index_select(dim, order.to(shards[0].device))


def _positions(all_ranges: Sequence[Ranges]) -> Tensor:
    return torch.tensor([index for ranges in all_ranges for piece in ranges for index in piece], dtype=torch.int64)
