"""The balance loss of mixture-of-experts models, over the tokens of all ranks.

It is ``E * sum_e f_e P_e`` (Switch Transformer, arXiv 2101.03961): f is the share of tokens that an expert gets, P its
mean probability. A product of means is no mean of products, so sums are added over ranks before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Balance(NamedTuple):
    """How a model weighs and computes its balance loss."""

    coefficient: float
    num_experts: int
    top_k: int


def balance_of(model: Any) -> Balance | None:
    """The model's balance loss; None if its configuration does not ask for one (``output_router_logits``).

    Raises:
        ValueError: It does, but the model does not have it in the form that most have.
    """
    if not getattr(model.config, "output_router_logits", False):
        return None
    names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    found: list[Any] = [getattr(model, name, None) for name in names]
    if not all(isinstance(value, int | float) for value in found):
        raise ValueError(
            f"output_router_logits=true, but {type(model).__name__} has no {', '.join(names)}: its balance loss is of "
            "an unknown form. Set overrides: {output_router_logits: false}."
        )
    return Balance(*found)


def balance_loss(
    router_logits: Sequence[Tensor], balance: Balance, sum_over_ranks: Callable[[Tensor], Tensor]
) -> Tensor:
    """The balance loss over all layers and all ranks' tokens.

    Args:
        router_logits: [tokens, experts] of every layer, of this rank's tokens.
        balance: Of the model.
        sum_over_ranks: Adds a tensor up over the ranks that hold different tokens; called once.

    Returns:
        A float32 scalar, the same on all ranks. Its gradient is of this rank's tokens: the ranks' add up to the whole.
    """
    logits = torch.cat([layer.flatten(0, -2) for layer in router_logits])
    probabilities = logits.softmax(dim=-1)
    chosen = probabilities.topk(balance.top_k, dim=-1).indices
    counts = torch.zeros(balance.num_experts, device=logits.device)
    counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=counts.dtype))
    local = probabilities.float().sum(dim=0)
    sums = sum_over_ranks(torch.cat([counts, local.detach(), counts.new_tensor([len(logits)])]))
    counts, total, num_rows = sums.split([balance.num_experts, balance.num_experts, 1])
    total = total + (local - local.detach())
    return balance.num_experts * (counts / num_rows * (total / num_rows)).sum()
