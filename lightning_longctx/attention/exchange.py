"""The all-to-all of head parallelism as a pair of custom ops, each the other's inverse and gradient.

As with the ring, an op is one node for ``torch.compile`` and for checkpointing, and finds its ring by name.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_longctx.attention.heads import held_heads, pack_heads, pack_tokens, unpack_heads, unpack_tokens
from lightning_longctx.attention.rings import Ring, find_ring
from lightning_longctx.topology.degrees import check_head_degree

# No `from __future__ import annotations` here: the ops' schemas are read from the annotations.


def trade_tokens_for_heads(
    query: Tensor, key: Tensor, value: Tensor, ring: str, degree: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Before attention: some heads of all head ranks' tokens, in one all-to-all for all three; differentiable.

    Args:
        query: [B, Hq, t, D], this rank's t tokens, as many as on every other head rank; any strides.
        key: [B, Hkv, t, D].
        value: [B, Hkv, t, D].
        ring: Name of the open ring.
        degree: Head ranks U.

    Returns:
        query [B, Hq / U, U * t, D] and key, value [B, max(Hkv / U, 1), U * t, D], token-major in memory: the heads
        that ``heads.local_heads`` says, and the head ranks' tokens in rank order, which is their context rank's shard.

    Raises:
        ValueError: The degree does not fit the heads, before anything is sent, or the ring has other head ranks.
    """
    check_head_degree("head", degree, query.shape[1], key.shape[1], replicate=True)
    query, key, value = split_heads([query, key, value], ring, degree)
    return query, key, value


def trade_heads_for_tokens(out: Tensor, ring: str, degree: int) -> Tensor:
    """After attention: [B, Hq / U, U * t, D] to [B, Hq, t, D], token-major in memory; differentiable."""
    return join_heads([out], [out.shape[1] * degree], ring, degree)[0]


@torch.library.custom_op("longctx::split_heads", mutates_args=())
def split_heads(tensors: Sequence[Tensor], ring: str, degree: int) -> list[Tensor]:
    """Tensors [B, H, t, D] to [B, max(H / U, 1), U * t, D], in one all-to-all."""
    found = _find(ring, degree)
    received = _exchange(found, pack_heads(tensors, degree, found.buffers))
    results = unpack_tokens(received, [tensor.shape for tensor in tensors])
    found.buffers.give(received)
    return results


@torch.library.custom_op("longctx::join_heads", mutates_args=())
def join_heads(tensors: Sequence[Tensor], num_heads: Sequence[int], ring: str, degree: int) -> list[Tensor]:
    """Tensors [B, max(H / U, 1), U * t, D] to [B, H, t, D], in one all-to-all; copies of a head are summed.

    ``num_heads`` are the H: where there are copies, the tensors do not tell.
    """
    found = _find(ring, degree)
    received = _exchange(found, pack_tokens(tensors, degree, found.buffers))
    results = unpack_heads(received, _joined_shapes(tensors, num_heads, degree))
    found.buffers.give(received)
    return results


def _find(ring: str, degree: int) -> Ring:
    found = find_ring(ring)
    if found is None or found.heads is None or found.heads.degree != degree:
        raise ValueError(
            f"the batch was cut for head={degree}, but the ring {ring!r} does not have so many head ranks."
        )
    return found


def _exchange(ring: Ring, sent: Tensor) -> Tensor:
    received = ring.buffers.take(sent.shape, sent.dtype, sent.device)
    ring.heads.exchange(sent, received)  # type: ignore[union-attr]  _find has looked
    ring.buffers.give(sent)
    return received


def _joined_shapes(tensors: Sequence[Tensor], num_heads: Sequence[int], degree: int) -> list[tuple[int, ...]]:
    pairs = zip(tensors, num_heads, strict=True)
    return [(x.shape[0], heads, x.shape[2] // degree, x.shape[3]) for x, heads in pairs]


def _token_major(tensor: Tensor, batch: int, heads: int, tokens: int, width: int) -> Tensor:
    return tensor.new_empty(batch, tokens, heads, width).transpose(1, 2)


@split_heads.register_fake
def _(tensors, ring, degree):
    shapes = [(x.shape[0], held_heads(x.shape[1], degree), x.shape[2] * degree, x.shape[3]) for x in tensors]
    return [_token_major(x, *shape) for x, shape in zip(tensors, shapes, strict=True)]


@join_heads.register_fake
def _(tensors, num_heads, ring, degree):
    shapes = _joined_shapes(tensors, num_heads, degree)
    return [_token_major(x, *shape) for x, shape in zip(tensors, shapes, strict=True)]


def _setup_split(ctx, inputs, output):
    tensors, ctx.ring, ctx.degree = inputs
    ctx.num_heads = [tensor.shape[1] for tensor in tensors]


def _split_backward(ctx, grads):
    return join_heads(grads, ctx.num_heads, ctx.ring, ctx.degree), None, None


def _setup_join(ctx, inputs, output):
    *_, ctx.ring, ctx.degree = inputs


def _join_backward(ctx, grads):
    return split_heads(grads, ctx.ring, ctx.degree), None, None, None


split_heads.register_autograd(_split_backward, setup_context=_setup_split)
join_heads.register_autograd(_join_backward, setup_context=_setup_join)
