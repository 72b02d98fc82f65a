"""Cross entropy of logits that tensor ranks hold in parts of the vocabulary: no rank ever has a whole row of them."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from lightning_longctx.batch import IGNORE


def split_cross_entropy(logits: DTensor, labels: Tensor) -> Tensor:
    """Cross entropy summed over the labels that count, as ``F.cross_entropy(..., reduction="sum")`` of whole logits.

    After Megatron's vocabulary-parallel cross entropy (arXiv 1909.08053): ranks exchange three numbers a token, the
    largest logit, the sum of exponentials and the logit of the label.

    Args:
        logits: [N, V] float32 or float64, ``Shard(1)`` over a one-dimensional mesh; parts may be uneven or empty.
        labels: [N] int64, the same on all ranks of the mesh; -100 where nothing counts.

    Returns:
        A scalar, the same on all ranks of the mesh.

    Raises:
        ValueError: The logits are cut in another way, or a label is no id of the vocabulary.
    """
    mesh, size = logits.device_mesh, logits.shape[1]
    if mesh.ndim != 1 or logits.placements != (Shard(1),):
        raise ValueError(
            f"logits placed as {logits.placements} over a mesh of {mesh.ndim} dims: they must be cut over the "
            "vocabulary alone, [Shard(-1)] on the tensor axis, or be whole tensors."
        )
    if not torch.compiler.is_compiling() and bool(((labels < 0) & (labels != IGNORE) | (labels >= size)).any()):
        raise ValueError(f"a label is outside of the vocabulary of {size} ids, and is not {IGNORE}.")
    first = min(mesh.get_local_rank() * -(-size // mesh.size()), size)  # as torch.chunk cuts
    return cast("Tensor", _SplitCrossEntropy.apply(logits.to_local(), labels, first, mesh.get_group()))


class _SplitCrossEntropy(torch.autograd.Function):
    """Arguments: this rank's columns [N, v], labels [N], the id of its first column, the tensor ranks."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, labels: Tensor, first: int, group: ProcessGroup) -> Tensor:
        largest = columns.new_full(labels.shape, -torch.inf)
        if columns.shape[1]:
            largest = columns.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        own = labels - first
        is_here = (own >= 0) & (own < columns.shape[1])
        own = torch.where(is_here, own, 0)
        sums = columns.new_zeros(2, len(labels))  # of exponentials, and the label's logit
        torch.sum((columns - largest[:, None]).exp_(), dim=1, out=sums[0])
        if columns.shape[1]:
            sums[1] = torch.where(is_here, columns.gather(1, own[:, None])[:, 0], 0.0)
        dist.all_reduce(sums, group=group)
        counts = labels != IGNORE
        log_sum = sums[0].log_().add_(largest)
        ctx.save_for_backward(columns, log_sum, own, is_here, counts)
        return torch.where(counts, log_sum - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        columns, log_sum, own, is_here, counts = ctx.saved_tensors
        result = (columns - log_sum[:, None]).exp_()
        if columns.shape[1]:
            result.scatter_add_(1, own[:, None], -is_here[:, None].to(result.dtype))
        result.mul_(torch.where(counts, grad, 0.0)[:, None])
        return result, None, None, None
