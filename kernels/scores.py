"""What the attention kernels share on the device: addresses, the mask of a tile table, softcap, dropout.

Addresses are 64-bit: indices are widened before they meet a stride, since more than 2^31 elements are what a million
tokens make.
"""

from __future__ import annotations

import triton.language as tl

from lightning_longctx.kernels.jit import jit


def _interpreted_product(a, b):
    if a.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit(interpreted=_interpreted_product)
def product(a, b):
    """Matrix product with wide sums. The interpreter (Triton 3.9) would multiply the bits of bfloat16 as integers."""
    return tl.dot(a, b, input_precision="ieee")


def _interpreted_narrowed(x, dtype):
    if dtype != tl.bfloat16:
        return x.to(dtype)
    bits = x.to(tl.uint32, bitcast=True)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, even, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit(interpreted=_interpreted_narrowed)
def narrowed(x, dtype: tl.constexpr):
    """Round to nearest. The interpreter (Triton 3.9) loses the carry into the exponent of a bfloat16."""
    return x.to(dtype)


@jit
def address(tensor, batch, head, index, PADDED: tl.constexpr):
    """Pointers [N, PADDED] to rows of one head; ``tensor`` is ``Strided``."""
    base = tensor.memory + batch.to(tl.int64) * tensor.batch + head.to(tl.int64) * tensor.head
    return base + (index.to(tl.int64)[:, None] * tensor.token + tl.arange(0, PADDED)[None, :])


@jit
def rows_of(tensor, batch, head, index, present, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load rows [N, PADDED]: 0 where not ``present`` (None: all are), and from ``WIDTH`` on."""
    pointers = address(tensor, batch, head, index, PADDED)
    inside = (tl.arange(0, PADDED) < WIDTH)[None, :]
    if present is not None:
        rows = tl.load(pointers, mask=present[:, None] & inside, other=0.0)
    elif WIDTH < PADDED:
        rows = tl.load(pointers, mask=inside, other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@jit
def store_rows(tensor, batch, head, index, present, rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store rows [N, PADDED], in the tensor's dtype, where present and up to ``WIDTH``."""
    inside = (tl.arange(0, PADDED) < WIDTH)[None, :]
    pointers = address(tensor, batch, head, index, PADDED)
    tl.store(pointers, narrowed(rows, tensor.memory.dtype.element_ty), mask=present[:, None] & inside)


@jit
def entry(numbers, index):
    """One number of a schedule."""
    return tl.load(numbers + index).to(tl.int32)


@jit
def seen_by(plan, visit, query, key, M: tl.constexpr, N: tl.constexpr, BY_KEY: tl.constexpr):
    """The mask of a visit's tiles.

    Returns:
        Who sees whom, [M, N], or [N, M] if ``BY_KEY``; and [M] and [N], the queries and keys that are in any of the
        tiles: memory of the others may hold anything, and 0 * NaN is NaN.
    """
    queries, keys = tl.full([M], 0, tl.int32) > 0, tl.full([N], 0, tl.int32) > 0
    if BY_KEY:
        offset = key[:, None] - query[None, :]
    else:
        offset = key[None, :] - query[:, None]
    seen = (offset - offset) > 0
    for member in range(entry(plan.visits, 3 * visit + 1), entry(plan.visits, 3 * visit + 2)):
        tile = plan.tiles + 6 * tl.load(plan.members + member)
        rows = (query >= entry(tile, 0)) & (query < entry(tile, 1))
        columns = (key >= entry(tile, 2)) & (key < entry(tile, 3))
        inside = (offset > entry(tile, 4)) & (offset <= entry(tile, 5))
        if BY_KEY:
            inside = inside & rows[None, :] & columns[:, None]
        else:
            inside = inside & rows[:, None] & columns[None, :]
        seen, queries, keys = seen | inside, queries | rows, keys | columns
    return seen, queries, keys


@jit
def tanh(x):
    """Builtins have none. ``1 - 2 / (1 + exp(2x))`` cancels near 0, where five terms of the series err by 1e-12."""
    square = x * x
    tail = square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))
    series = x * (1.0 + square * (-1.0 / 3.0 + tail))
    return tl.where(square < 0.01, series, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))


@jit
def capped(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores before the mask."""
    scores = products * scale
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    return scores


@jit
def mix(word):
    """A bijection of 32-bit words ("lowbias32" of hash-prospector)."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@jit
def words_of(rows, batch, head, query, present):
    """The two random words of query rows, [M] uint32 each; ``rows`` is ``Strided``, of width 2, or None: no words."""
    words = None
    if rows is not None:
        base = rows.memory + batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head
        pointers = base + query.to(tl.int64) * rows.token
        first, second = tl.load(pointers, mask=present, other=0), tl.load(pointers + 1, mask=present, other=0)
        words = (first.to(tl.uint32), second.to(tl.uint32))
    return words


@jit
def positions_of(positions, key, present):
    """What dropout knows keys by, [N] uint32; None without dropout. ``present`` as in ``rows_of``."""
    numbers = None
    if positions is not None:
        if present is not None:
            numbers = tl.load(positions + key, mask=present, other=0).to(tl.uint32)
        else:
            numbers = tl.load(positions + key).to(tl.uint32)
    return numbers


@jit
def kept(first, second, keys, THRESHOLD: tl.constexpr):
    """Which weights dropout leaves; the words of rows and keys come in shapes that broadcast."""
    return mix(mix(keys ^ first) ^ second) >= tl.full([1, 1], THRESHOLD, tl.uint32)


@jit(interpreted=lambda x: tl.max.fn(x, 1))
def row_max(x):
    """[M, N] -> [M]."""
    return tl.max(x, 1)


@jit(interpreted=lambda x: tl.sum.fn(x, 1))
def row_sum(x):
    """[M, N] -> [M]."""
    return tl.sum(x, 1)
