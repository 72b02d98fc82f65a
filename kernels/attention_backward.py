"""Banded attention backward over a tile table: one launch for dq, one for dk and dv; no atomics, so deterministic.

With the final ``out`` and ``lse`` over all keys, ``P = exp(s - lse)`` are the weights, ``Z = keep / (1 - p)``:
``delta = rowsum(dout * out)``, ``dP = Z * (dout . v)``, ``dS = P * (dP - delta) * (1 - (s / softcap)^2)``,
``dq = scale * dS k``, ``dk = scale * dS^T q``, ``dv = (Z * P)^T dout`` (Dao, FlashAttention-2, arXiv 2307.08691,
algorithm 2, in two launches: the first also writes delta, which the second reads).
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
    row_sum,
    rows_of,
    seen_by,
    store_rows,
    words_of,
)


@jit
def _weights(products, dweights, lse, delta, seen, keep, scale, softcap, keep_scale, SOFTCAP: tl.constexpr):
    """``Z * P`` and ``dS`` of a block, either way round; lse and delta come in shapes that broadcast."""
    scores = capped(products, scale, softcap, SOFTCAP)
    weights = tl.exp(scores - lse)
    if seen is not None:
        weights = tl.where(seen, weights, 0.0)
    used = weights
    if keep is not None:
        used = tl.where(keep, weights * keep_scale, 0.0)
        dweights = tl.where(keep, dweights * keep_scale, 0.0)
    dscores = weights * (dweights - delta)
    if SOFTCAP:
        ratio = scores / softcap
        dscores = dscores * (1.0 - ratio * ratio)
    if seen is not None:
        dscores = tl.where(seen, dscores, 0.0)
    return used, dscores


@jit
def _add_keys(acc, row, words, k, v, drawn, seen, factors, SOFTCAP: tl.constexpr, THRESHOLD: tl.constexpr):
    """``dS k`` of one more block of keys; ``row`` is (q, dout, lse, delta)."""
    q, dout, logs, delta = row
    scale, softcap, keep_scale = factors
    keep = None
    if THRESHOLD:
        keep = kept(words[0][:, None], words[1][:, None], drawn[None, :], THRESHOLD)
    products = product(q, tl.trans(k))
    dweights = product(dout, tl.trans(v))
    _, dscores = _weights(
        products, dweights, logs[:, None], delta[:, None], seen, keep, scale, softcap, keep_scale, SOFTCAP
    )
    return acc + product(narrowed(dscores, k.dtype), k)


@jit
def _add_queries(sums, k, v, row, words, drawn, seen, factors, SOFTCAP: tl.constexpr, THRESHOLD: tl.constexpr):
    """``dS^T q`` and ``(Z P)^T dout`` of one more block of queries: transposed, [N, M]."""
    q, dout, logs, delta = row
    scale, softcap, keep_scale = factors
    keep = None
    if THRESHOLD:
        keep = kept(words[0][None, :], words[1][None, :], drawn[:, None], THRESHOLD)
    products = product(k, tl.trans(q))
    dweights = product(v, tl.trans(dout))
    used, dscores = _weights(
        products, dweights, logs[None, :], delta[None, :], seen, keep, scale, softcap, keep_scale, SOFTCAP
    )
    dvalue = sums[1] + product(narrowed(used, dout.dtype), dout)
    return sums[0] + product(narrowed(dscores, q.dtype), q), dvalue


@jit(do_not_specialize=["num_queries"])
def attention_dq(
    query,
    key,
    value,
    grad,
    out,
    lse,
    delta,
    dquery,
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
    """The dq and delta of one block of queries of one head."""
    lane = tl.program_id(0) % lanes
    block = entry(plan.order, tl.program_id(0) // lanes)
    batch, head = lane // num_heads, lane % num_heads
    queries = block * M + tl.arange(0, M)
    present = queries < num_queries
    place = lane.to(tl.int64) * num_queries + queries
    q = rows_of(query, batch, head, queries, present, WIDTH, PADDED)
    dout = rows_of(grad, batch, head, queries, present, WIDTH, PADDED)
    final = rows_of(out, batch, head, queries, present, WIDTH, PADDED)
    deltas = row_sum(dout.to(WIDE) * final.to(WIDE))
    tl.store(delta + place, deltas, mask=present)
    row = (q, dout, tl.load(lse + place, mask=present, other=float("inf")), deltas)
    factors = (scale, softcap, keep_scale)
    words = words_of(rows, batch, head, queries, present)
    acc = tl.full([M, PADDED], 0.0, WIDE)
    for run in range(entry(plan.run_starts, block), entry(plan.run_starts, block + 1)):
        for inner in range(entry(plan.runs, 2 * run), entry(plan.runs, 2 * run + 1)):
            keys = inner * N + tl.arange(0, N)
            k = rows_of(key, batch, head // group, keys, None, WIDTH, PADDED)
            v = rows_of(value, batch, head // group, keys, None, WIDTH, PADDED)
            drawn = positions_of(positions, keys, None)
            acc = _add_keys(acc, row, words, k, v, drawn, None, factors, SOFTCAP, THRESHOLD)
    for visit in range(entry(plan.visit_starts, block), entry(plan.visit_starts, block + 1)):
        keys = entry(plan.visits, 3 * visit) * N + tl.arange(0, N)
        seen, _, here = seen_by(plan, visit, queries, keys, M, N, False)
        k = rows_of(key, batch, head // group, keys, here, WIDTH, PADDED)
        v = rows_of(value, batch, head // group, keys, here, WIDTH, PADDED)
        drawn = positions_of(positions, keys, here)
        acc = _add_keys(acc, row, words, k, v, drawn, seen, factors, SOFTCAP, THRESHOLD)
    store_rows(dquery, batch, head, queries, present, acc * scale, WIDTH, PADDED)


@jit
def _row_of(
    query, grad, lse, delta, batch, head, lane, queries, num_queries, present, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """(q, dout, lse, delta) of a block of queries; ``present`` as in ``rows_of``, but the last block may be cut off."""
    inside = queries < num_queries
    place = lane.to(tl.int64) * num_queries + queries
    q = rows_of(query, batch, head, queries, present, WIDTH, PADDED)
    dout = rows_of(grad, batch, head, queries, present, WIDTH, PADDED)
    return (
        q,
        dout,
        tl.load(lse + place, mask=inside, other=float("inf")),
        tl.load(delta + place, mask=inside, other=0.0),
    )


@jit(do_not_specialize=["num_queries", "num_keys"])
def attention_dkdv(
    query,
    key,
    value,
    grad,
    lse,
    delta,
    dkey,
    dvalue,
    rows,
    positions,
    plan,
    num_queries,
    num_keys,
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
    """The dk and dv of one block of keys of one key/value head, over all query heads that share it."""
    lane = tl.program_id(0) % lanes
    block = entry(plan.order, tl.program_id(0) // lanes)
    kv_heads = num_heads // group
    batch, kv_head = lane // kv_heads, lane % kv_heads
    keys = block * N + tl.arange(0, N)
    owned = keys < num_keys
    k = rows_of(key, batch, kv_head, keys, owned, WIDTH, PADDED)
    v = rows_of(value, batch, kv_head, keys, owned, WIDTH, PADDED)
    factors = (scale, softcap, keep_scale)
    drawn = positions_of(positions, keys, owned)
    dk, dv = tl.full([N, PADDED], 0.0, WIDE), tl.full([N, PADDED], 0.0, WIDE)
    for member in range(group):
        head = kv_head * group + member
        q_lane = batch * num_heads + head
        for run in range(entry(plan.run_starts, block), entry(plan.run_starts, block + 1)):
            for inner in range(entry(plan.runs, 2 * run), entry(plan.runs, 2 * run + 1)):
                queries = inner * M + tl.arange(0, M)
                row = _row_of(query, grad, lse, delta, batch, head, q_lane, queries, num_queries, None, WIDTH, PADDED)
                words = words_of(rows, batch, head, queries, queries < num_queries)
                dk, dv = _add_queries((dk, dv), k, v, row, words, drawn, None, factors, SOFTCAP, THRESHOLD)
        for visit in range(entry(plan.visit_starts, block), entry(plan.visit_starts, block + 1)):
            queries = entry(plan.visits, 3 * visit) * M + tl.arange(0, M)
            seen, here, _ = seen_by(plan, visit, queries, keys, M, N, True)
            row = _row_of(query, grad, lse, delta, batch, head, q_lane, queries, num_queries, here, WIDTH, PADDED)
            words = words_of(rows, batch, head, queries, here)
            dk, dv = _add_queries((dk, dv), k, v, row, words, drawn, seen, factors, SOFTCAP, THRESHOLD)
    store_rows(dkey, batch, kv_head, keys, owned, dk * scale, WIDTH, PADDED)
    store_rows(dvalue, batch, kv_head, keys, owned, dv, WIDTH, PADDED)
