"""The decoder once more, as plain formulas on a state dict: no module, no fused operator, float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_longctx.models import DecoderConfig

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


def rotate(x: Tensor, position_ids: Tensor, base: float) -> Tensor:
    """[B, H, T, D], pair by pair with a complex exponential."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), position_ids.double()[:, None, :, None] * frequencies)
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat((turned.real, turned.imag), -1)


def attention(
    x: Tensor, weights: Weights, position_ids: Tensor, config: DecoderConfig, window: int | None = None
) -> Tensor:
    """Rows are one document each."""
    batch, length, _ = x.shape

    def heads(name: str, count: int) -> Tensor:
        return (x @ weights[f"{name}.weight"].T).view(batch, length, count, config.head_size).transpose(1, 2)

    query = rotate(heads("query", config.num_heads), position_ids, config.rope_base)
    key = rotate(heads("key", config.kv_heads), position_ids, config.rope_base)
    sharers = config.num_heads // config.kv_heads
    key, value = (x.repeat_interleave(sharers, dim=1) for x in (key, heads("value", config.kv_heads)))
    scores = query @ key.transpose(-1, -2) / math.sqrt(config.head_size)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    unseen = (distance < 0) | (distance >= (length if window is None else window))
    scores = scores.masked_fill(unseen, -torch.inf)
    if config.sinks:
        sinks = weights["sinks"][:, None, None].expand(batch, -1, length, 1)
        scores = torch.cat((scores, sinks), -1)
    found = scores.softmax(-1)[..., :length] @ value
    return found.transpose(1, 2).reshape(batch, length, -1) @ weights["output.weight"].T


def mlp(x: Tensor, weights: Weights) -> Tensor:
    gate = x @ weights["gate.weight"].T
    return (gate / (1 + (-gate).exp()) * (x @ weights["up.weight"].T)) @ weights["down.weight"].T


def block(
    x: Tensor, weights: Weights, position_ids: Tensor, config: DecoderConfig, window: int | None = None
) -> Tensor:
    normed = rms_norm(x, weights["attention_norm.weight"], config.norm_eps)
    x = x + attention(normed, below(weights, "attention."), position_ids, config, window)
    return x + mlp(rms_norm(x, weights["mlp_norm.weight"], config.norm_eps), below(weights, "mlp."))


def decoder(input_ids: Tensor, position_ids: Tensor, weights: Weights, config: DecoderConfig) -> Tensor:
    x = weights["embedding.weight"][input_ids]
    for layer in range(config.num_layers):
        window = config.windows[layer % len(config.windows)]
        x = block(x, below(weights, f"blocks.{layer}."), position_ids, config, window)
    head = weights["embedding.weight" if config.tie_embeddings else "head.weight"]
    return rms_norm(x, weights["norm.weight"], config.norm_eps) @ head.T


def below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
