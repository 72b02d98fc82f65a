"""Stand-ins on CPU for the CUDA kernels of PyTorch and flash-attn: their signatures, layouts and clamps, dense inside.

What callers pass is checked as the C++ does (``csrc/flash_attn/flash_api.cpp`` of flash-attn 2.8.3,
``flash_attn/cute/interface.py`` of flash-attn-4 4.0.0b36), but for the dtype: float32 and float64 are let through, so
that numbers can be compared closely.
"""

import sys
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType

import torch

from lightning_longctx.attention.backends import flash


def check(query, key, value, query_ends, key_ends, most_queries, most_keys):
    """What every one of them asks of its inputs."""
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == value.shape and query.shape[2] == key.shape[2] and query.shape[1] % key.shape[1] == 0
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for ends, most, tensor in ((query_ends, most_queries, query), (key_ends, most_keys, key)):
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends.device == tensor.device
        lengths = ends.diff().tolist()
        assert ends[0] == 0 and ends[-1] == len(tensor), "a kernel neither reads nor writes other rows"
        assert min(lengths) > 0 and max(lengths) <= most and isinstance(most, int)
    assert len(query_ends) == len(key_ends)
    assert most_queries > 1, "flash-attn would take its way for decoding"


def masks(query_ends, key_ends, most_keys, left, right):
    """``(queries, keys, seen)`` of every sequence; limits are clamped and aligned as in the kernels."""
    left, right = (-1 if left >= most_keys else left), (-1 if right >= most_keys else right)
    if left < 0 <= right:
        left = most_keys
    if right < 0 <= left:
        right = most_keys
    for (q0, q1), (k0, k1) in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        place = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None] - (k1 - k0 - (q1 - q0))
        seen = torch.ones_like(place, dtype=torch.bool)
        if left >= 0:
            seen &= place >= -left
        if right >= 0:
            seen &= place <= right
        yield slice(q0, q1), slice(k0, k1), seen


def raw_scores(query, key, scale):
    """[H, n, m] in float64, and the keys of every query head."""
    heads = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).double()
    return torch.einsum("qhd,khd->hqk", query.double(), heads) * scale, heads


def capped(scores, softcap):
    return softcap * (scores / softcap).tanh() if softcap else scores


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def attention(query, key, value, ends, scale, window, softcap=0.0):
    """Out [n, Hq, D] and lse [Hq, n]; a row without keys gets lse +inf, as flash-attn writes it."""
    check(query, key, value, *ends)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[1], len(query), dtype=wide(query.dtype))
    for rows, columns, seen in masks(ends[0], ends[1], ends[3], *window):
        scores = capped(raw_scores(query[rows], key[columns], scale)[0], softcap).masked_fill(~seen, float("-inf"))
        _, values = raw_scores(query[rows], value[columns], scale)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(query.dtype)
        lse[:, rows] = scores.logsumexp(-1).nan_to_num(neginf=float("inf")).to(lse.dtype)
    return out, lse


def attention_backward(grad, query, key, value, out, lse, ends, scale, window, softcap=0.0):
    """dq, dk and dv from the final out and lse."""
    check(query, key, value, *ends)
    assert grad.shape == out.shape == query.shape and grad.dtype == out.dtype == query.dtype
    assert grad.stride(-1) == out.stride(-1) == 1
    assert lse.shape == (query.shape[1], len(query)) and lse.is_contiguous() and lse.dtype == wide(query.dtype)
    assert lse.isfinite().all(), "no row without a key, and the lse of all keys"
    dquery, dkey, dvalue = (torch.zeros(tensor.shape, dtype=torch.float64) for tensor in (query, key, value))
    for rows, columns, seen in masks(ends[0], ends[1], ends[3], *window):
        scores, keys = raw_scores(query[rows], key[columns], scale)
        _, values = raw_scores(query[rows], value[columns], scale)
        some = capped(scores, softcap).masked_fill(~seen, float("-inf"))
        weights = (some - lse[:, rows, None].double()).exp()
        douts = grad[rows].double()
        delta = (douts * out[rows].double()).sum(-1).t().unsqueeze(-1)
        dscores = weights * (torch.einsum("qhd,khd->hqk", douts, values) - delta)
        if softcap:
            dscores = dscores * (1 - (scores / softcap).tanh().square())
        dquery[rows] += scale * torch.einsum("hqk,khd->qhd", dscores, keys)
        groups = (key.shape[1], -1)
        dkeys = scale * torch.einsum("hqk,qhd->khd", dscores, query[rows].double())
        dkey[columns] += dkeys.unflatten(1, groups).sum(2)
        dvalue[columns] += torch.einsum("hqk,qhd->khd", weights, douts).unflatten(1, groups).sum(2)
    return tuple(grad.to(query.dtype) for grad in (dquery, dkey, dvalue))


@contextmanager
def torch_varlen(calls):
    """``torch.nn.attention.varlen`` itself, on CPU: only the two ATen operations under it are stood in for."""

    def forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, **options):
        window = options.pop("window_size_left"), options.pop("window_size_right")
        assert dropout_p == 0.0 and not return_debug_mask and not any(x is not None for x in options.values())
        assert is_causal == (window == (-1, 0))
        calls.append(("forward", window, len(cum_q) - 1))
        out, lse = attention(q, k, v, (cum_q, cum_k, max_q, max_k), scale, window)
        seeds = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return out, lse, *seeds, torch.empty(0)

    def backward(
        dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, is_causal, rng, unused, *, scale=None, **window
    ):
        window = window["window_size_left"], window["window_size_right"]
        assert p == 0.0 and is_causal == (window == (-1, 0)) and rng.dtype == torch.uint64
        calls.append(("backward", window, len(cum_q) - 1))
        return attention_backward(dout, q, k, v, out, lse, (cum_q, cum_k, max_q, max_k), scale, window)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def install_flash_attn_2(monkeypatch, calls, version="2.8.3"):
    """``import flash_attn.flash_attn_interface`` finds functions with the signatures of flash-attn 2.7 to 2.8."""
    functions = (_forward_of_2(calls), _backward_of_2(calls))
    _install(monkeypatch, "flash_attn.flash_attn_interface", functions, {"flash-attn": version})


def _forward_of_2(calls):
    def _flash_attn_varlen_forward(
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
        block_table=None,
        leftpad_k=None,
        seqused_k=None,
    ):
        assert dropout_p == 0.0 and isinstance(softcap, float)
        window = (window_size_left, 0 if causal else window_size_right)
        calls.append(("forward", window, len(cu_seqlens_q) - 1))
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *attention(q, k, v, ends, softmax_scale, window, softcap), torch.empty(0), torch.empty(2)

    return _flash_attn_varlen_forward


def _backward_of_2(calls):
    def _flash_attn_varlen_backward(
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
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):
        assert dropout_p == 0.0 and isinstance(softcap, float) and alibi_slopes is None
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        window = (window_size_left, 0 if causal else window_size_right)
        calls.append(("backward", window, len(cu_seqlens_q) - 1))
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        found = attention_backward(dout, q, k, v, out, softmax_lse, ends, softmax_scale, window, softcap)
        for target, like, grad in zip((dq, dk, dv), (q, k, v), found, strict=True):
            assert target.shape == like.shape and target.dtype == like.dtype and target.stride(-1) == 1
            target.copy_(grad)
        return torch.empty(0)

    return _flash_attn_varlen_backward


def install_flash_attn_4(monkeypatch, calls, version="4.0.0b36"):
    """``import flash_attn.cute.interface`` finds functions that take what we pass to those of flash-attn-4."""

    def _flash_attn_fwd(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        min_seqlen_k=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        softcap=None,
        window_size_left=None,
        window_size_right=None,
        return_lse=False,
    ):
        assert return_lse
        window = _window(causal, window_size_left, window_size_right)
        calls.append(("forward", window, len(cu_seqlens_q) - 1))
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *attention(q, k, v, ends, softmax_scale, window, softcap), None, None, None

    def _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        window_size_left=None,
        window_size_right=None,
        *,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        deterministic=False,
    ):
        window = _window(causal, window_size_left, window_size_right)
        calls.append(("backward", window, len(cu_seqlens_q) - 1))
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attention_backward(dout, q, k, v, out, lse, ends, softmax_scale, window, softcap)

    functions = (_flash_attn_fwd, _flash_attn_bwd)
    _install(monkeypatch, "flash_attn.cute.interface", functions, {"flash-attn-4": version})


def _window(causal, left, right):
    """flash-attn-4 says None where the others say -1."""
    assert left is None or left >= 0
    return (-1 if left is None else left, 0 if causal else (-1 if right is None else right))


def _install(monkeypatch, name, functions, versions):
    module = ModuleType(name)
    vars(module).update({function.__name__: function for function in functions})
    parents = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)]
    for parent in parents:
        if parent not in sys.modules:
            package = ModuleType(parent)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, parent, package)
    monkeypatch.setitem(sys.modules, name, module)
    set_versions(monkeypatch, versions)


def set_versions(monkeypatch, versions):
    """As if just these packages were installed."""

    def version(package):
        if package not in versions:
            raise flash.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(flash, "version", version)
    flash._first.cache_clear()
