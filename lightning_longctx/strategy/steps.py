"""What must hold around a step: degrees that exist, batches that say how they were cut, attention that looks afar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lightning_longctx.attention import intercepted
from lightning_longctx.attention.dropout import StepDraws, drawing
from lightning_longctx.attention.op import rings_run
from lightning_longctx.models.hugging_face.whole import whole_models
from lightning_longctx.strategy.contents import BatchContents
from lightning_longctx.topology import Degrees
from lightning_longctx.topology.mesh import ParallelMesh


@contextmanager
def whole_attention(contents: BatchContents, degrees: Degrees, step: str, module: nn.Module) -> Iterator[None]:
    """Inside, attention calls see whole sequences.

    Args:
        contents: Of the step's batch.
        degrees: Whose context and head ranks share a sequence.
        step: Name of the step, for errors.
        module: Whose step it is; Hugging Face models in it are set to our attention.

    Raises:
        ValueError: Sequences are spread over ranks, but the batch does not say how, or a training step never called
            attention in a way that could be noticed: it has mixed tokens within this rank's shard at most.
    """
    shared = degrees.context * degrees.head > 1
    named = f"context={degrees.context}" + (f" x head={degrees.head}" if degrees.head > 1 else "")
    if shared and not contents.records:
        raise ValueError(
            f"{named}, but the batch of {step} has no `sequence` entry, so it was not cut over the ranks. "
            "Take `batch` (not dataloader_iter), let the loader yield dicts with input_ids [B, S], and keep `sequence` "
            "in hooks that rebuild the batch."
        )
    for record in contents.records:
        record.prepare()
    before = rings_run()
    with intercepted(contents.records), whole_models(module, contents.records):
        yield
    if shared and step == "training_step" and rings_run() == before:
        raise ValueError(
            f"{named}, but {step} made no attention call that could be noticed, so no token has seen another "
            "rank's. Use F.scaled_dot_product_attention(..., is_causal=True) or lightning_longctx.attend."
        )


@contextmanager
def recomputed_attention(contents: BatchContents, draws: StepDraws, module: nn.Module) -> Iterator[None]:
    """The same around a backward: checkpointing recomputes attention there.

    Args:
        contents: Of the step's batch.
        draws: What the step's attention drew from.
        module: As in ``whole_attention``.
    """
    with intercepted(contents.records), whole_models(module, contents.records), drawing(draws):
        yield


def compare_batches(contents: BatchContents, mesh: ParallelMesh, device: torch.device) -> None:
    """Let ranks that share samples compare what they have read: a collective over all ranks, before each step.

    The sizes of messages in attention follow from the documents of a batch; ranks with unlike ones would hang or abort.

    Raises:
        ValueError: They have read other samples; the same on every rank.
    """
    if mesh.degrees.context * mesh.degrees.head * mesh.degrees.tensor == 1:
        return
    checksum = sum(record.checksum for record in contents.records) % 2**62 if contents.records else -1
    mine = torch.tensor([checksum], device=device)
    everyone = mine.new_empty(mesh.device_mesh.size(), 1)
    dist.all_gather(list(everyone.unbind()), mine)  # ranks count along the data axis last
    check_same_batches(everyone.view(mesh.degrees.shape[0], -1).tolist())


def check_same_batches(checksums: list[list[int]]) -> None:
    """Check that ranks which share sequences have cut the same ones.

    Args:
        checksums: Of each data rank's context x head x tensor ranks, in order.

    Raises:
        ValueError: They have not; the same on every rank.
    """
    for data_rank, sums in enumerate(checksums):
        if len(set(sums)) > 1:
            odd = [place for place, checksum in enumerate(sums) if checksum != sums[0]]
            raise ValueError(
                f"the ranks of data rank {data_rank} share samples, but ranks {odd} of them read other samples than "
                "rank 0. Random choices in datasets and samplers must be the same on all of them: draw from a "
                "torch.Generator seeded alike, and not from the default one, which a rank may have used alone."
            )
