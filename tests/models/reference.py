"""The decoder once more, as plain formulas on a state dict: no module, no fused operator, float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_longctx.models import DecoderConfig, RopeScaling

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


def frequency(pair: int, half: int, base: float, scaling: RopeScaling | None, length: int = 0) -> float:
    """Radians per position of one pair of a head of width 2 * half."""
    if scaling is None:
        return base ** (-pair / half)
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    if scaling.rope_type == "linear":
        return base ** (-pair / half) / factor
    if scaling.rope_type == "dynamic":
        longer = max(1.0, factor * length / original - factor + 1)
        return (base * longer ** (half / (half - 1))) ** (-pair / half)
    plain = base ** (-pair / half)
    turns = original * plain / (2 * math.pi)
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    else:
        fast, slow = (half * math.log(original / (each * 2 * math.pi)) / math.log(base) for each in (32, 1))
        first, last = max(0, math.floor(fast)), min(2 * half - 1, math.ceil(slow))
        kept = 1 - min(1.0, max(0.0, (pair - first) / (last - first)))
    return plain * (kept + (1 - kept) / factor)


def rotate(
    x: Tensor, position_ids: Tensor, base: float, scaling: RopeScaling | None = None, lengths: Sequence[int] = (0,)
) -> Tensor:
    """[B, H, T, D], pair by pair with a complex exponential."""
    half = x.shape[-1] // 2
    rows = [[frequency(pair, half, base, scaling, length) for pair in range(half)] for length in lengths]
    frequencies = torch.tensor(rows, dtype=torch.float64)[:, None, None]
    if scaling is not None and scaling.rope_type == "yarn":
        x = x * (0.1 * math.log(scaling.factor) + 1)
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

    query, key = heads("query", config.num_heads), heads("key", config.kv_heads)
    if config.qk_norm:
        query = rms_norm(query, weights["query_norm.weight"], config.norm_eps)
        key = rms_norm(key, weights["key_norm.weight"], config.norm_eps)
    lengths = (position_ids.max(1).values + 1).tolist()
    query, key = (rotate(x, position_ids, config.rope_base, config.rope_scaling, lengths) for x in (query, key))
    sharers = config.num_heads // config.kv_heads
    key, value = (x.repeat_interleave(sharers, dim=1) for x in (key, heads("value", config.kv_heads)))
    scores = query @ key.transpose(-1, -2) / math.sqrt(config.head_size)
    if config.softcap is not None:
        scores = config.softcap * (scores / config.softcap).tanh()
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
