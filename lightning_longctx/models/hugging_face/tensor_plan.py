"""The tensor plans that Hugging Face models carry, in the styles of ``torch.distributed.tensor.parallel``.

Theirs cut matrices only: activations between them are whole on every tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_longctx.models.hugging_face.whole import find_models
from lightning_longctx.models.tensor_plan import TensorPlan, shared_by_heads

_WHOLE = Replicate()
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=_WHOLE),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=_WHOLE),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=_WHOLE),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=_WHOLE),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=_WHOLE),
    "replicated_with_grad_allreduce": shared_by_heads,
}
"""By transformers' names."""


def hugging_face_plans(module: nn.Module) -> TensorPlan:
    """The plans of all Hugging Face models in a module, by names in the module; empty if there are none.

    Raises:
        ValueError: A model carries no plan, or one with a style that is not available; or it is no submodule.
    """
    plan: dict[str, ParallelStyle | Shard] = {}
    names = {id(part): name for name, part in module.named_modules()}
    for model in find_models(module):
        if id(model) not in names:
            raise ValueError(
                f"tensor ranks cannot share {type(model).__name__}: it is in a list or dict of the module. Make it an "
                "attribute, or train with tensor=1."
            )
        prefix = f"{names[id(model)]}." if names[id(model)] else ""
        plan |= {prefix + name: style for name, style in carried_plan(model).items()}
    return plan


def carried_plan(model: Any) -> TensorPlan:
    """The plan of one model, by names in the model.

    Raises:
        ValueError: It carries none, or one with a style that is not available.
    """
    kind, carried = type(model).__name__, model.tp_plan
    if not carried:
        raise ValueError(f"{kind} carries no tensor plan (tp_plan). Train it with tensor=1.")
    if unknown := sorted({style for style in carried.values() if style not in _STYLES}):
        raise ValueError(
            f"the tensor plan of {kind} has the styles {', '.join(unknown)}, which are not available (known are "
            f"{', '.join(sorted(_STYLES))}). Train it with tensor=1, or give a plan of your own: tensor_parallel_plan."
        )
    return {name: _STYLES[style]() for name, style in carried.items()}


def with_cut_logits(plan: TensorPlan, head: str) -> TensorPlan:
    """The same plan with logits that stay cut over the vocabulary.

    Args:
        plan: Any.
        head: Name of the output matrix; if the plan does not cut it, nothing changes.
    """
    cut = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return {name: cut if name == head and isinstance(style, ColwiseParallel) else style for name, style in plan.items()}
