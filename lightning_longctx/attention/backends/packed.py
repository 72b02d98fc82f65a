"""Tables of tiles for libraries whose kernels take packed sequences: pack, call, and put results where they belong."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_longctx.attention.backends.contract import Needs, Scores, Tiles
from lightning_longctx.attention.merge import merge_, wide_dtype
from lightning_longctx.plan.rounds import Window, joined, rounds

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_WIDTH, _WIDTH_STEP = 256, 8
_CAPABILITY = (8, 0)


class Sequences(NamedTuple):
    """What a kernel is told about the sequences of one call.

    Args:
        query_ends: [n + 1] int32, cumulative lengths from 0 on (``cu_seqlens``).
        key_ends: The same for the keys.
        most_queries: Of one sequence, or more.
        most_keys: Of one sequence, or more.
        window: Which keys a query sees.
    """

    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int
    window: Window

    @property
    def causal(self) -> bool:
        """No lower limit, and the last query at the last key."""
        return self.window == (-1, 0)


class Kernel(Protocol):
    """A library's attention over packed sequences: query [n, Hq, D], key and value [m, Hkv, D], last dim dense."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Out [n, Hq, D] and lse [Hq, n]."""
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        sequences: Sequences,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv with the shapes of query, key and value; out and lse [Hq, n] are the final ones."""
        ...


class Rows(NamedTuple):
    """Some tokens of all rows of a batch, taken one row after another: a slice, or an index [size]."""

    start: int
    size: int
    index: Tensor | None

    def of(self, tokens: Tensor) -> Tensor:
        """These of [B * T, ...]; a view if they are a slice."""
        if self.index is None:
            return tokens.narrow(0, self.start, self.size)
        return tokens.index_select(0, self.index)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add [size, ...] to these of [B * T, ...], in the dtype of the total."""
        if self.index is None:
            self.of(total).add_(part)
        else:
            total.index_add_(0, self.index, part.to(total.dtype))


class Call(NamedTuple):
    """One call of a kernel, and where its tokens are."""

    queries: Rows
    keys: Rows
    sequences: Sequences


def packed_forward(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scores: Scores
) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``; tiles are such as ``plan.rounds.aligned_parts`` gives."""
    batch, heads, tokens, width = query.shape
    calls = _calls(tiles, batch, tokens, key.shape[2], query.device)
    inputs = _token_rows(query), _token_rows(key), _token_rows(value)
    if len(calls) == 1 and calls[0].queries.size == batch * tokens:
        out, lse = _call(kernel, calls[0], *inputs, scores)
    else:
        wide = wide_dtype(query.dtype)
        out = torch.zeros((batch * tokens, heads, width), dtype=wide, device=query.device)
        lse = torch.full((batch * tokens, heads), float("-inf"), dtype=wide, device=query.device)
        for call in calls:
            _merge(call.queries, out, lse, *_call(kernel, call, *inputs, scores))
    out, lse = out.unflatten(0, (batch, tokens)), lse.unflatten(0, (batch, tokens))
    return out.transpose(1, 2).to(query.dtype), lse.transpose(1, 2).contiguous()


def packed_backward(
    kernel: Kernel,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Backend.backward``; sums over several calls stay in the wide dtype."""
    batch, _, tokens, _ = query.shape
    calls = _calls(tiles, batch, tokens, key.shape[2], query.device)
    rows = tuple(map(_token_rows, (grad, query, key, value, out)))
    lses, wide = lse.transpose(1, 2).flatten(0, 1), wide_dtype(query.dtype)
    if len(calls) == 1 and (calls[0].queries.size, calls[0].keys.size) == (len(rows[1]), len(rows[2])):
        sums = _call_backward(kernel, calls[0], rows, lses, scores)
    else:
        sums = [torch.zeros(tensor.shape, dtype=wide, device=tensor.device) for tensor in rows[1:4]]
        for call in calls:
            parts = _call_backward(kernel, call, rows, lses, scores)
            for place, total, part in zip((call.queries, call.keys, call.keys), sums, parts, strict=True):
                place.add(total, part)
    lengths = tokens, key.shape[2], key.shape[2]
    dquery, dkey, dvalue = (
        total.unflatten(0, (batch, length)).transpose(1, 2) for total, length in zip(sums, lengths, strict=True)
    )
    return dquery, dkey, dvalue


def packed_refusal(needs: Needs) -> str | None:
    """What no library that wraps CUDA's flash attention computes; None if one may."""
    if needs.device.type != "cuda":
        return f"runs on cuda, not on {needs.device.type}"
    if torch.version.hip is not None:
        return "not on ROCm, where lse has another layout"
    if needs.dropout:
        return "its dropout is not by position, so it would change with the layout"
    if needs.dtype not in _DTYPES:
        return f"no {needs.dtype}"
    if needs.width > _MOST_WIDTH or needs.width % _WIDTH_STEP:
        return f"head width {needs.width} is not a multiple of {_WIDTH_STEP} up to {_MOST_WIDTH}"
    found = capability(needs.device)
    if found is not None and found < _CAPABILITY:
        return f"needs compute capability 8.0 (Ampere), this GPU has {found[0]}.{found[1]}"
    return None


def capability(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device; None where there is none to ask, as when a plan for another machine is explained."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def _token_rows(tensor: Tensor) -> Tensor:
    """[B, H, T, D] as [B * T, H, D]: a view, unless rows of a batch are not token-major."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _call(
    kernel: Kernel, call: Call, query: Tensor, key: Tensor, value: Tensor, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Out [n, Hq, D] and lse [n, Hq] of the call's queries."""
    rows = call.queries.of(query), call.keys.of(key), call.keys.of(value)
    out, lse = kernel.forward(*rows, call.sequences, scores)
    if lse.shape != (query.shape[1], call.queries.size):
        heads, size = query.shape[1], call.queries.size
        raise ValueError(f"a kernel gave lse {tuple(lse.shape)} for {size} queries of {heads} heads.")
    return out, lse.t()


def _call_backward(
    kernel: Kernel, call: Call, rows: tuple[Tensor, ...], lses: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the call's queries, keys and values; ``rows`` are grad, query, key, value and out of all tokens."""
    places = call.queries, call.queries, call.keys, call.keys, call.queries
    grad, query, key, value, out = (place.of(tensor) for place, tensor in zip(places, rows, strict=True))
    lse = call.queries.of(lses).t().contiguous()
    return kernel.backward(grad, query, key, value, out, lse, call.sequences, scores)


def _merge(rows: Rows, out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    some_out, some_lse = rows.of(out), rows.of(lse)
    merge_(some_out, some_lse, new_out.to(out.dtype), new_lse.to(lse.dtype))
    if rows.index is not None:
        out.index_copy_(0, rows.index, some_out)
        lse.index_copy_(0, rows.index, some_lse)


@lru_cache(maxsize=64)
def _calls(tiles: Tiles, batch: int, num_queries: int, num_keys: int, device: torch.device) -> tuple[Call, ...]:
    """Every tile of every row of the batch is a sequence."""
    calls = []
    for window, some in rounds(tiles):
        queries = [(row * num_queries + t.q_start, row * num_queries + t.q_stop) for row in range(batch) for t in some]
        keys = [(row * num_keys + t.k_start, row * num_keys + t.k_stop) for row in range(batch) for t in some]
        # flash-attn computes calls with one query a sequence in a way of its own, for decoding, with another layout of
        # lse on the way: not here.
        most_queries = max(2, *(tile.num_queries for tile in some))
        most_keys = max(tile.num_keys for tile in some)
        sequences = Sequences(_ends(queries, device), _ends(keys, device), most_queries, most_keys, window)
        calls.append(Call(_rows(queries, device), _rows(keys, device), sequences))
    return tuple(calls)


def _ends(intervals: list[tuple[int, int]], device: torch.device) -> Tensor:
    lengths = torch.tensor([0, *(stop - start for start, stop in intervals)])
    return lengths.cumsum(0).to(device, torch.int32)


def _rows(intervals: list[tuple[int, int]], device: torch.device) -> Rows:
    stretches = joined(intervals)
    size = sum(stop - start for start, stop in stretches)
    if len(stretches) == 1:
        return Rows(stretches[0][0], size, None)
    index = torch.cat([torch.arange(start, stop) for start, stop in stretches])
    return Rows(stretches[0][0], size, index.to(device))
