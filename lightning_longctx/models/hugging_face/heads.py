"""The output matrix of a Hugging Face model, if its logits are a plain product with it: asked of the model itself.

Many a model scales its logits or bends them (final softcapping). Its class does not say so, and neither does a step
with small logits show it. So the model's own forward is run once on final states of our choice, small and large, and
what it makes of them is compared with the product.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from lightning_longctx._upstream import is_compiled
from lightning_longctx.models.hugging_face.calls import parameters_of

_MAGNITUDES = (1.0, 1e2, 1e3)
"""Of the states that are tried; a cap of some tens shows at the larger ones."""
_TOLERANCE = 1e-3
"""Relative to the largest logit of a token. The operations are the same, so this only allows for other kernels."""


def plain_head(model: Any) -> nn.Linear | None:
    """The model's output matrix; None if its logits may be anything else than the product with it.

    With tensor ranks, or sharded parameters, every rank must ask, while parameters are gathered; all get one answer.

    Args:
        model: Any module.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel) or is_compiled(model):
        return None
    base, head = model.base_model, model.get_output_embeddings()
    if isinstance(model, FSDPModule) or isinstance(head, FSDPModule):
        return None  # by itself, so that its weights are gathered only in a call of it
    if base is model or not isinstance(head, nn.Linear) or "logits_to_keep" not in parameters_of(type(model).forward):
        return None
    return head if not _has_more(model, head) and _is_plain(model, head) else None


def _has_more(model: Any, head: nn.Linear) -> bool:
    """Whether logits have a part that can be neutral now and is not when it has been trained (LoRA, a learnt scale)."""
    plain = {id(weight) for weight in (head.weight, head.bias) if weight is not None}
    known = plain | {id(weight) for weight in model.base_model.parameters()}
    changed = type(head).forward is not nn.Linear.forward or "forward" in vars(head) or "forward" in vars(model)
    return changed or any(id(weight) not in known for weight in model.parameters())


@contextmanager
def final_states(model: Any) -> Iterator[list[Tensor]]:
    """While open, the list gets the last hidden states [B, T, width] of every call of a causal model's base."""
    found: list[Tensor] = []
    handle = model.base_model.register_forward_hook(lambda part, args, output: found.append(output[0]))
    try:
        yield found
    finally:
        handle.remove()


@torch.no_grad()
def _is_plain(model: Any, head: nn.Linear) -> bool:
    weight = head.weight
    drawn = torch.randn(1, 1, head.in_features, generator=torch.Generator().manual_seed(0))
    states = (drawn * torch.tensor(_MAGNITUDES)[:, None]).to(weight.device, weight.dtype)
    try:
        found = _logits_of(model, states)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False  # its forward wants more of its base than states: not a plain one
    expected = _whole(F.linear(_like(states, weight), weight, head.bias)).double()
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    largest = expected.abs().amax(dim=-1, keepdim=True)
    close = (_whole(found).double() - expected).abs() <= _TOLERANCE * largest
    return bool(close.all() & (largest > 0).all())


def _logits_of(model: Any, states: Tensor) -> Any:
    """Run the model's forward on final states, in place of those of its base."""
    forward, prefix = type(model).forward, model.base_model_prefix
    options = {"output_router_logits": False} if "output_router_logits" in parameters_of(forward) else {}
    tokens = torch.zeros(states.shape[:-1], dtype=torch.int64, device=states.device)
    base = model._modules[prefix]
    model._modules[prefix] = _Given(states)
    try:
        return forward(model, input_ids=tokens, use_cache=False, **options).logits
    finally:
        model._modules[prefix] = base


class _Given(nn.Module):
    """A base model that has its last hidden states from elsewhere."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        return _Outputs(self.states)


class _Outputs:
    """Outputs that have last hidden states, and nothing else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]


def _like(states: Tensor, weight: Tensor) -> Tensor:
    if isinstance(weight, DTensor):
        return DTensor.from_local(states, weight.device_mesh, [Replicate()], run_check=False)
    return states


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
