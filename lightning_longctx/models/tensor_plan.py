"""How tensor ranks share the decoder (Megatron, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198).

Between matrices every tensor rank holds a part of the tokens, so that norms and residuals are computed once. Tokens are
gathered in front of matrices that are split by columns, and sums are scattered behind those that are split by rows. The
embedding and the head are split over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from lightning_longctx.models.config import DecoderConfig

TensorPlan = Mapping[str, ParallelStyle | Shard]
"""What tensor ranks share, by name of a submodule or parameter, in which ``*`` stands for one part of a name
(``blocks.*.mlp.up``). A submodule gets a style of ``torch.distributed.tensor.parallel``, a parameter the dim that it is
split on (``Shard(0)``): its module sees a DTensor then, of which ``.to_local()`` is this rank's part."""

_TOKENS = Shard(1)
"""Tokens are dim 1 of [B, T, width]."""


def decoder_plan(config: DecoderConfig, prefix: str = "") -> TensorPlan:
    """The plan of a ``Decoder``: tensor ranks must divide its query heads and its key/value heads.

    Args:
        config: Its shape.
        prefix: In front of all names, such as ``decoder.``.
    """
    gathered = Replicate()
    plan: dict[str, ParallelStyle | Shard] = {
        "embedding": RowwiseParallel(input_layouts=gathered, output_layouts=_TOKENS),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(_TOKENS, None, None), desired_input_layouts=(gathered, None, None)
        ),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=_TOKENS),
        "blocks.*.mlp_norm": SequenceParallel(),
        "blocks.*.mlp": PrepareModuleInput(input_layouts=_TOKENS, desired_input_layouts=gathered),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=_TOKENS),
        "norm": SequenceParallel(),
    }
    if config.qk_norm:
        plan |= {f"blocks.*.attention.{name}": shared_by_heads() for name in ("query_norm", "key_norm")}
    if config.sinks:
        plan["blocks.*.attention.sinks"] = Shard(0)
    if not config.tie_embeddings:
        plan["head"] = ColwiseParallel(input_layouts=_TOKENS, output_layouts=Shard(-1), use_local_output=False)
    return {prefix + name: style for name, style in plan.items()}


def shared_by_heads() -> ParallelStyle:
    """For a norm that all heads share, and each tensor rank applies to its own: its gradient is the sum over ranks.

    It works over the last dim, so that any other one may stand for the heads.
    """
    return SequenceParallel(sequence_dim=1, use_local_output=True)
