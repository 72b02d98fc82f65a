"""Stands in for the package flash-attn where there is no CUDA: its functions, computed by PyTorch's CPU operation.

Only what the peers call. Signatures are flash-attn's (2.6.3 and later); tensors are [batch, tokens, heads, width], or
[tokens, heads, width] with cumulative lengths; a causal mask of unequal lengths ends at both last tokens.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from lightning_longctx._upstream import flash_attention_cpu, flash_attention_cpu_backward
from lightning_longctx.cli.bench.attention_case import scaled_dot_product

_VERSION = "2.8.3"


def install() -> None:
    """Let ``import flash_attn`` find this, in this process. Call it before a peer is imported."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__path__, package.__spec__ = [], ModuleSpec("flash_attn", None, is_package=True)
    names = {
        "_flash_attn_forward": forward,
        "_flash_attn_backward": backward,
        "_flash_attn_varlen_forward": varlen_forward,
        "_flash_attn_varlen_backward": varlen_backward,
        "flash_attn_func": flash_attn_func,
    }
    for name, function in names.items():
        setattr(interface, name, function)
    vars(package).update(__version__=_VERSION, flash_attn_interface=interface, flash_attn_func=flash_attn_func)
    sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": interface})


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """The differentiable entry."""
    _refuse(dropout_p=dropout_p)
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product(*heads_first, is_causal=causal, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


def forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    """Output [batch, tokens, heads, width], lse [batch, heads, tokens], and two that only dropout needs."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    return *_forward(q, k, v, softmax_scale, causal), None, None


def backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
):
    """Write the gradients into ``dq``, ``dk``, ``dv``."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    found = _backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into.copy_(gradient)


def varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    """The same for documents one after another; lse is [heads, tokens]."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    found = [
        _forward(q[None, rows], k[None, columns], v[None, columns], softmax_scale, causal)
        for rows, columns in _documents(cu_seqlens_q, cu_seqlens_k)
    ]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], dim=1), None, None


def varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
):
    """Write the gradients into ``dq``, ``dk``, ``dv``."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    for rows, columns in _documents(cu_seqlens_q, cu_seqlens_k):
        keys, queries = (k[None, columns], v[None, columns]), (out[None, rows], softmax_lse[None, :, rows])
        found = _backward(dout[None, rows], q[None, rows], *keys, *queries, softmax_scale, causal)
        for into, gradient in zip((dq[rows], dk[columns], dv[columns]), found, strict=True):
            into.copy_(gradient[0])


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    before = k.shape[1] - q.shape[1]
    if not causal or before == 0:
        out, lse = flash_attention_cpu(*_heads_first(q, k, v), 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse
    # The operation aligns a causal mask at the first tokens: so the keys before the queries are a call of their own.
    early_out, early_lse = _forward(q, k[:, :before], v[:, :before], scale, False)
    late_out, late_lse = _forward(q, k[:, before:], v[:, before:], scale, True)
    lse = torch.logaddexp(early_lse, late_lse)
    early, late = ((part - lse).exp().transpose(1, 2)[..., None] for part in (early_lse, late_lse))
    return (early_out * early + late_out * late).to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    before = k.shape[1] - q.shape[1]
    if not causal or before == 0:
        inputs = _heads_first(dout, q, k, v, out)
        grads = flash_attention_cpu_backward(*inputs, lse.contiguous(), 0.0, causal, scale=scale)
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv
    early = _backward(dout, q, k[:, :before], v[:, :before], out, lse, scale, False)
    late = _backward(dout, q, k[:, before:], v[:, before:], out, lse, scale, True)
    return early[0] + late[0], torch.cat([early[1], late[1]], 1), torch.cat([early[2], late[2]], 1)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    queries, keys = (
        [slice(start, stop) for start, stop in pairwise(cumulative.tolist())]
        for cumulative in (cu_seqlens_q, cu_seqlens_k)
    )
    return list(zip(queries, keys, strict=True))


def _refuse(dropout_p=0.0, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None):
    if dropout_p or softcap or alibi_slopes is not None or {window_size_left, window_size_right} - {-1, None}:
        raise ValueError("the stand-in for flash-attn knows no dropout, window, softcap or alibi.")
