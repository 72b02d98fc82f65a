"""Banded attention forward over a tile table, in one launch.

With ``s = cap(scale * q . k)``, ``cap(x) = softcap * tanh(x / softcap)`` or ``x``, over the keys that a query sees:
``lse = log sum exp(s)`` and ``out = sum exp(s - lse) * keep / (1 - p) * v``. A program owns a block of queries of one
head, walks over blocks of keys and holds a running maximum ``m``, sum ``l`` and numerator ``acc``; the last two shrink
by ``exp(m - m')`` when the maximum grows to ``m'`` (Milakov & Gimelshein, arXiv 1805.02867; Dao, FlashAttention-2,
arXiv 2307.08691, algorithm 1). Masked scores are ``-inf``, not a large number that a low score could lose against.
Scores are subtracted before ``exp`` scales them to base 2: large ones would lose their last bits.
"""

from __future__ import annotations

import triton.language as tl

from lightning_longctx.kernels.jit import jit
from lightning_longctx.kernels.scores import (
    capped,
    entry,
    kept,
    narrowed,
    positions_of,
    product,
    row_max,
    row_sum,
    rows_of,
    seen_by,
    store_rows,
    words_of,
)


@jit
def _add_block(state, q, words, k, v, positions, seen, scale, softcap, SOFTCAP: tl.constexpr, THRESHOLD: tl.constexpr):
    """The online softmax after one more block of keys; ``state`` is (m [M], l [M], acc [M, D])."""
    highest, total, acc = state
    scores = capped(product(q, tl.trans(k)), scale, softcap, SOFTCAP)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, row_max(scores))
    level = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
    weights = tl.exp(scores - level[:, None])
    shrink = tl.exp(highest - level)
    total = total * shrink + row_sum(weights)
    if THRESHOLD:
        keep = kept(words[0][:, None], words[1][:, None], positions[None, :], THRESHOLD)
        weights = tl.where(keep, weights, 0.0)
    acc = acc * shrink[:, None] + product(narrowed(weights, v.dtype), v)
    return higher, total, acc


@jit(do_not_specialize=["num_queries"])
def attention_forward(
    query,
    key,
    value,
    out,
    lse,
    rows,
    positions,
    plan,
    num_queries,
    num_heads,
    group,
    lanes,
    scale,
    softcap,
    keep_scale,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    THRESHOLD: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """The out and lse of one block of queries of one head; arguments as ``attention.forward`` makes them."""
    lane = tl.program_id(0) % lanes
    block = entry(plan.order, tl.program_id(0) // lanes)
    batch, head = lane // num_heads, lane % num_heads
    queries = block * M + tl.arange(0, M)
    present = queries < num_queries
    q = rows_of(query, batch, head, queries, present, WIDTH, PADDED)
    words = words_of(rows, batch, head, queries, present)
    highest, total = tl.full([M], float("-inf"), WIDE), tl.full([M], 0.0, WIDE)
    acc = tl.full([M, PADDED], 0.0, WIDE)
    for run in range(entry(plan.run_starts, block), entry(plan.run_starts, block + 1)):
        for inner in range(entry(plan.runs, 2 * run), entry(plan.runs, 2 * run + 1)):
            keys = inner * N + tl.arange(0, N)
            k = rows_of(key, batch, head // group, keys, None, WIDTH, PADDED)
            v = rows_of(value, batch, head // group, keys, None, WIDTH, PADDED)
            drawn = positions_of(positions, keys, None)
            state = (highest, total, acc)
            highest, total, acc = _add_block(state, q, words, k, v, drawn, None, scale, softcap, SOFTCAP, THRESHOLD)
    for visit in range(entry(plan.visit_starts, block), entry(plan.visit_starts, block + 1)):
        keys = entry(plan.visits, 3 * visit) * N + tl.arange(0, N)
        seen, _, here = seen_by(plan, visit, queries, keys, M, N, False)
        k = rows_of(key, batch, head // group, keys, here, WIDTH, PADDED)
        v = rows_of(value, batch, head // group, keys, here, WIDTH, PADDED)
        drawn = positions_of(positions, keys, here)
        state = (highest, total, acc)
        highest, total, acc = _add_block(state, q, words, k, v, drawn, seen, scale, softcap, SOFTCAP, THRESHOLD)
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    store_rows(out, batch, head, queries, present, acc * (keep_scale / total)[:, None], WIDTH, PADDED)
    logs = tl.where(blind, float("-inf"), highest + tl.log(total))
    tl.store(lse + (lane.to(tl.int64) * num_queries + queries), logs, mask=present)
