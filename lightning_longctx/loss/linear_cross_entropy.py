"""The output matrix and its cross entropy in tiles of tokens: no tensor of tokens x vocabulary exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_longctx.batch import IGNORE
from lightning_longctx.loss.vocabulary import (
    VocabularyPart,
    check_labels,
    exchange_sums,
    subtract_labels_,
    vocabulary_part,
)

TILE_BYTES = 64 * 2**20
"""Logits of a tile, which ``auto_tile_tokens`` aims at."""
_LEAST_TOKENS, _MULTIPLE = 128, 64
"""Products of fewer rows are slower than the same work in larger ones."""


def auto_tile_tokens(num_columns: int) -> int:
    """Tokens of a tile: as many as have 64 MiB of float32 logits, in multiples of 64, but at least 128.

    More would take memory and save no time: products of some hundred rows are as fast as larger ones.

    Args:
        num_columns: Size of the vocabulary, or of the largest part of it that a tensor rank has.
    """
    tokens = TILE_BYTES // (4 * max(num_columns, 1))
    return max(tokens // _MULTIPLE * _MULTIPLE, _LEAST_TOKENS)


def linear_cross_entropy(
    states: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, tile_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """``token_cross_entropy(F.linear(states, weight, bias), labels)``, a tile of tokens at a time.

    Forward computes the gradients too, while it has a tile's logits (three products in all; computing logits again in
    backward would make four), and backward only scales them, once. Tokens without a label cost nothing. Logits are
    rounded as ``F.linear`` rounds them, under autocast as well; the rest is computed in float32, in float64 if they
    are, and so are sums over tiles.

    With tensor ranks each has a part of the vocabulary: tokens are gathered once, gradients scattered once, and ranks
    exchange three numbers a token.

    Args:
        states: [..., width]. With tensor ranks a DTensor, whose tokens may be cut, or a tensor that is the same on all.
        weight: [V, width]. With tensor ranks a DTensor, ``Shard(0)`` over a one-dimensional mesh.
        labels: [...] int64, already shifted: the token that each position predicts, -100 where nothing counts. Whole
            on every tensor rank.
        bias: [V], placed as ``weight``.
        tile_tokens: Tokens of a tile; None chooses (see ``auto_tile_tokens``). The numbers do not depend on it.

    Returns:
        The sum, which is 0 but still in the graph if no label counts, and the int64 number of labels that count.

    Raises:
        ValueError: Shapes do not fit, a label is no id of the vocabulary, or the matrix is cut in another way.
        RuntimeError: In backward, if it runs a second time, for the gradients are used up, or is to be differentiated.
    """
    if states.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit states of shape {tuple(states.shape)}: there must be "
            "one label for each vector of the last dim."
        )
    if tile_tokens is not None and tile_tokens < 1:
        raise ValueError(f"tile_tokens={tile_tokens} must be at least 1.")
    size = weight.shape[0]
    check_labels(labels, size)
    states, weight, bias, mesh = _local(states, weight, bias)
    part = None if mesh is None else vocabulary_part(size, mesh)
    tokens = tile_tokens or auto_tile_tokens(size if mesh is None else -(-size // mesh.size()))
    flat = states.reshape(labels.numel(), states.shape[-1])
    arguments = (flat, weight, bias, labels.flatten(), tokens, part, torch.is_grad_enabled())
    return cast("Tensor", _LinearCrossEntropy.apply(*arguments)), (labels != IGNORE).sum()


def _local(
    states: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, DeviceMesh | None]:
    """Tensors to compute with on this rank: all tokens, its part of the matrix; and the ranks that have the others."""
    mesh = next((each.device_mesh for each in (weight, states) if isinstance(each, DTensor)), None)
    if mesh is None:
        return states, weight, bias, None
    placed = weight.placements if isinstance(weight, DTensor) else (Replicate(),)
    if mesh.ndim != 1 or placed not in ((Shard(0),), (Replicate(),)):
        raise ValueError(
            f"an output matrix placed as {placed} over a mesh of {mesh.ndim} dims: it must be cut over the vocabulary "
            "alone, [Shard(0)] on the tensor axis, or be whole."
        )
    is_cut = placed == (Shard(0),)
    if not isinstance(states, DTensor):
        states = DTensor.from_local(states, mesh, [Replicate()], run_check=False)
    states = states.redistribute(placements=[Replicate()])
    states = states.to_local(grad_placements=[Partial() if is_cut else Replicate()])
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return states, weight, bias, mesh if is_cut else None


class _LinearCrossEntropy(torch.autograd.Function):
    """Arguments: states [N, width], weight [v, width], bias [v], labels [N], tokens of a tile, the part, grad mode."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        tile_tokens: int,
        part: VocabularyPart | None,
        grad_enabled: bool,
    ) -> Tensor:
        dtype = _product_dtype(states)
        wide = torch.promote_types(dtype, torch.float32)
        tiles = list(_tiles(labels, tile_tokens))
        needs = [grad_enabled and need for need in ctx.needs_input_grad[:3]]
        sums = _Sums.zeros(states, weight, bias, needs, wide)
        losses = [states.new_zeros(0, dtype=wide)]
        with torch.autocast(states.device.type, enabled=False):
            matrix, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
            for rows in tiles:
                inputs = states[rows].to(dtype)
                scores = F.linear(inputs, matrix, shift).to(wide)
                losses.append(_losses_(scores, labels[rows], part, any(needs)))
                sums.add(rows, inputs, matrix, scores)
                del scores  # or the next tile's would be made beside it
        ctx.gradients, ctx.dtypes = sums, [each if each is None else each.dtype for each in (states, weight, bias)]
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph
            raise RuntimeError(
                "linear_cross_entropy has no second derivative. Leave create_graph out, or use "
                "token_cross_entropy(F.linear(...))."
            )
        if ctx.gradients is None:
            raise RuntimeError(
                "a second backward through linear_cross_entropy: its gradients are computed in forward and used up by "
                "the first one. Compute the loss again, or use token_cross_entropy(F.linear(...))."
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (_scaled(each, grad, dtype) for each, dtype in zip(gradients, ctx.dtypes, strict=True))
        return *scaled, None, None, None, None


class _Sums(NamedTuple):
    """Gradients of states, weight and bias, summed over the tiles so far; None for those that nobody needs."""

    states: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, states: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool], wide: torch.dtype) -> _Sums:
        """Of states in their own dtype, for each token is of one tile; of the others in the wide one."""
        return cls(
            torch.zeros_like(states) if needs[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs[1] else None,
            torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None,
        )

    def add(self, rows: slice | Tensor, inputs: Tensor, matrix: Tensor, scores: Tensor) -> None:
        """Add a tile's.

        Args:
            rows: Which tokens they are.
            inputs: Their states [t, width], as they went into the product.
            matrix: As it went into the product.
            scores: Gradient of the logits [t, v], in the wide dtype.
        """
        if self.bias is not None:
            self.bias.add_(scores.sum(dim=0))
        if self.states is None and self.weight is None:
            return
        # Unscaled sums may leave float16's range, which is why it is used with a loss scale.
        narrow = scores.dtype if inputs.dtype == torch.float16 else inputs.dtype
        scores, inputs, matrix = scores.to(narrow), inputs.to(narrow), matrix.to(narrow)
        if self.states is not None:
            self.states[rows] = (scores @ matrix).to(self.states.dtype)
        if self.weight is not None and narrow == self.weight.dtype:
            self.weight.addmm_(scores.t(), inputs)
        elif self.weight is not None:
            self.weight.add_(scores.t() @ inputs)


def _product_dtype(states: Tensor) -> torch.dtype:
    """What ``F.linear`` computes in: autocast leaves float64 alone."""
    device = states.device.type
    if torch.is_autocast_enabled(device) and states.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return states.dtype


def _tiles(labels: Tensor, tile_tokens: int) -> Iterator[slice | Tensor]:
    """Which tokens are computed together: those that count, in order."""
    counts = labels != IGNORE
    if bool(counts.all()):
        yield from (slice(start, start + tile_tokens) for start in range(0, len(labels), tile_tokens))
    else:
        yield from (rows for rows in counts.nonzero()[:, 0].split(tile_tokens) if len(rows))


def _losses_(scores: Tensor, labels: Tensor, part: VocabularyPart | None, needs_gradient: bool) -> Tensor:
    """Losses [t] of a tile's logits [t, v], in whose place their gradient is left, or nothing of use."""
    if part is None:
        torch.log_softmax(scores, dim=1, out=scores)
        losses, own, is_here = -scores.gather(1, labels[:, None])[:, 0], labels, torch.ones_like(labels)
    else:
        log_sum, label_logit, own, is_here = exchange_sums(scores, labels, part)
        losses = log_sum - label_logit
        scores.sub_(log_sum[:, None])
    if needs_gradient:
        subtract_labels_(scores.exp_(), own, is_here)
    return losses


def _scaled(gradient: Tensor | None, grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """``gradient * grad``, in its place; compiled code may run again, so there it is left alone."""
    if gradient is None:
        return None
    return (gradient * grad if torch.compiler.is_compiling() else gradient.mul_(grad)).to(dtype)
