"""Cross entropy of logits that tensor ranks hold in parts of the vocabulary: no rank ever has a whole row of them."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_longctx.batch import IGNORE


class VocabularyPart(NamedTuple):
    """The ids of the vocabulary that are this rank's: the id of its first one, and the ranks that have the others."""

    first: int
    group: ProcessGroup


class TokenSums(NamedTuple):
    """What is known of [N] tokens once all ranks have been heard.

    Args:
        log_sum: Logarithm of the sum of exponentials of all logits.
        label_logit: The label's logit; 0 where the label is no id.
        own: Column of the label on this rank; 0 where it is another's.
        is_here: Whether the label is one of this rank's ids.
    """

    log_sum: Tensor
    label_logit: Tensor
    own: Tensor
    is_here: Tensor


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
    check_labels(labels, size)
    return cast("Tensor", _SplitCrossEntropy.apply(logits.to_local(), labels, vocabulary_part(size, mesh)))


def check_labels(labels: Tensor, size: int) -> None:
    """Raise ``ValueError`` if a label is neither one of ``size`` ids nor -100; compiled code is not stopped for it."""
    if not torch.compiler.is_compiling() and bool(((labels < 0) & (labels != IGNORE) | (labels >= size)).any()):
        raise ValueError(f"a label is outside of the vocabulary of {size} ids, and is not {IGNORE}.")


def vocabulary_part(size: int, mesh: DeviceMesh) -> VocabularyPart:
    """This rank's part of ``size`` ids that are cut over a one-dimensional mesh, as ``torch.chunk`` cuts."""
    first = min(mesh.get_local_rank() * -(-size // mesh.size()), size)
    return VocabularyPart(first, mesh.get_group())


def exchange_sums(columns: Tensor, labels: Tensor, part: VocabularyPart) -> TokenSums:
    """Let ranks tell each other three numbers a token, in two messages.

    Args:
        columns: This rank's columns [N, v] of the logits, float32 or float64; they are not changed.
        labels: [N], the same on all ranks.
        part: Which columns they are.
    """
    largest = columns.new_full(labels.shape, -torch.inf)
    if columns.shape[1]:
        largest = columns.amax(dim=1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=part.group)
    own = labels - part.first
    is_here = (own >= 0) & (own < columns.shape[1])
    own = torch.where(is_here, own, 0)
    sums = columns.new_zeros(2, len(labels))  # of exponentials, and the label's logit
    torch.sum((columns - largest[:, None]).exp_(), dim=1, out=sums[0])
    if columns.shape[1]:
        sums[1] = torch.where(is_here, columns.gather(1, own[:, None])[:, 0], 0.0)
    dist.all_reduce(sums, group=part.group)
    return TokenSums(sums[0].log_().add_(largest), sums[1], own, is_here)


def subtract_labels_(columns: Tensor, own: Tensor, is_here: Tensor) -> Tensor:
    """Subtract 1 in the column of each row's label, where it is this rank's, in place."""
    if columns.shape[1]:
        columns.scatter_add_(1, own[:, None], -is_here[:, None].to(columns.dtype))
    return columns


class _SplitCrossEntropy(torch.autograd.Function):
    """Arguments: this rank's columns [N, v], labels [N], and which columns they are."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, labels: Tensor, part: VocabularyPart) -> Tensor:
        sums = exchange_sums(columns, labels, part)
        counts = labels != IGNORE
        ctx.save_for_backward(columns, sums.log_sum, sums.own, sums.is_here, counts)
        return torch.where(counts, sums.log_sum - sums.label_logit, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        columns, log_sum, own, is_here, counts = ctx.saved_tensors
        result = subtract_labels_((columns - log_sum[:, None]).exp_(), own, is_here)
        result.mul_(torch.where(counts, grad, 0.0)[:, None])
        return result, None, None
