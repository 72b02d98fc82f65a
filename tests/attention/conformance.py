"""What every backend is held to, on any device: values and gradients of a table of tiles against float64."""

from __future__ import annotations

import math

import torch

from lightning_longctx.attention.backends import Dropout, Needs, Scores
from lightning_longctx.attention.backends.dropping import keeps
from lightning_longctx.attention.merge import RunningSoftmax, wide_dtype
from lightning_longctx.attention.ring import _cut
from lightning_longctx.attention.spans import batched
from lightning_longctx.attention.sums import TokenSum
from lightning_longctx.plan.tiles import Tile, full_tile
from lightning_longctx.testing.oracle import attention_oracle
from lightning_longctx.testing.tolerances import assert_close_relative, tolerance

CPU = torch.device("cpu")
SCALE = 0.2


def causal(start: int, size: int, k_start: int | None = None) -> Tile:
    k_start = start if k_start is None else k_start
    return Tile(start, start + size, k_start, k_start + size, -size, 0)


TABLES = {
    "full": (full_tile(0, 9, 0, 6),),
    "causal": (causal(0, 8),),
    "window": (Tile(0, 8, 0, 8, -3, 0),),
    "full window": (Tile(0, 5, 0, 7, -2, 6),),
    "rows and keys that meet nothing": (Tile(0, 7, 0, 8, 4, 6),),
    "tiny documents": (causal(0, 1), causal(1, 2), causal(3, 3), causal(6, 1), causal(7, 9)),
    "one query in several tiles, some in none": (causal(2, 6), full_tile(2, 8, 9, 12), full_tile(4, 8, 13, 14)),
    "windows in documents": (Tile(0, 6, 0, 6, -3, 0), Tile(6, 13, 6, 13, -4, 0)),
}
LONG_TABLES = {
    "causal": (causal(0, 700),),
    "many keys": (full_tile(0, 20, 0, 2500),),
    "narrow window": (Tile(0, 700, 0, 700, -60, 0),),
    "wide window": (Tile(0, 700, 0, 700, -400, 0),),
    "end of a wide window": (Tile(0, 600, 0, 600, 100, 599),),
    "band off the diagonal": (Tile(0, 600, 0, 900, 50, 350),),
    "documents": (causal(0, 300), causal(300, 1), causal(301, 399)),
}


def needs_of(device, dtype, width, tables=(), softcap=None, dropout_p=0.0):
    window = any(tile.lo > -tile.num_queries for tile in tables)
    return Needs(device, dtype, width, window, softcap is not None, dropout_p > 0)


def dense(query, key, value, tiles, scores):
    """Out and lse in float64 by definition, through autograd."""
    mask = torch.zeros(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    for tile in tiles:
        offset = torch.arange(tile.num_keys) - torch.arange(tile.num_queries)[:, None]
        seen = ((tile.lo < offset) & (offset <= tile.hi)).to(mask.device)
        mask[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] |= seen
    keep = None if scores.dropout is None else keeps(scores.dropout)
    p = 0.0 if scores.dropout is None else scores.dropout.p
    return attention_oracle(query, key, value, mask, scores.scale, softcap=scores.softcap, keep=keep, dropout_p=p)


def computed(engine, query, key, value, grad, tiles, scores):
    """Out, lse, dq, dk, dv of a table from what the backend makes of it, as the ring calls it."""
    running, sums = RunningSoftmax(query, value.shape[-1]), [TokenSum(tensor) for tensor in (query, key, value)]
    for work in _cut(engine, tiles, query.device, query.dtype, False, False, False):
        columns = [batched(tensor, work.keys) for tensor in (key, value)]
        some = scores.part(work.queries, work.keys)
        out, lse = engine.forward(batched(query, work.queries), *columns, work.tiles, some)
        assert out.dtype == query.dtype and lse.dtype == wide_dtype(query.dtype)
        running.add(work.queries, out, lse)
    out, lse = running.result()
    out = out.to(query.dtype)
    for work in _cut(engine, tiles, query.device, query.dtype, False, True, False):
        rows = [batched(tensor, work.queries) for tensor in (grad, query)]
        columns = [batched(tensor, work.keys) for tensor in (key, value)]
        final = [batched(tensor, work.queries) for tensor in (out, lse)]
        some = scores.part(work.queries, work.keys)
        shares = engine.backward(*rows, *columns, *final, work.tiles, some)
        for total, share, span in zip(sums, shares, (work.queries, work.keys, work.keys), strict=True):
            total.add(span, share)
    return out, lse, *(total.total() for total in sums)


def check_table(
    engine, tiles, dtype, width, kv_heads, *, softcap=None, dropout_p=0.0, device=CPU, heads=4, batch=2, slack=1.0
):
    torch.manual_seed(0)
    num_queries, num_keys = max(tile.q_stop for tile in tiles), max(tile.k_stop for tile in tiles)
    query = torch.randn(batch, heads, num_queries, width, dtype=dtype, device=device)
    key, value = (torch.randn(batch, kv_heads, num_keys, width, dtype=dtype, device=device) for _ in range(2))
    dropout = None
    if dropout_p:
        words = torch.randint(2**32, (batch, heads, num_queries, 2), device=device)
        dropout = Dropout(dropout_p, words, torch.randint(2**20, (num_keys,), device=device))
    scores = Scores(SCALE * math.sqrt(16 / width), softcap, dropout)
    grad = torch.randn_like(query)
    leaves = [tensor.double().detach().requires_grad_() for tensor in (query, key, value)]
    expected, expected_lse = dense(*leaves, tiles, scores)
    exact = (expected, expected_lse, *torch.autograd.grad(expected, leaves, grad.double()))
    found = computed(engine, query, key, value, grad, tiles, scores)
    for index, name in enumerate(("out", "lse", "dq", "dk", "dv")):
        allowed = tolerance(dtype) if index < 2 else 1.5 * tolerance(dtype, grad=True)
        assert_close_relative(found[index], exact[index], name, slack * allowed)
