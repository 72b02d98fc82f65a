"""Turns ``F.scaled_dot_product_attention`` into ring attention inside a step, and refuses what cannot be honoured."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_longctx import _upstream
from lightning_longctx.attention.attend import AttentionOptions, attend_masked
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.record import SequenceRecord

_SDPA = F.scaled_dot_product_attention
_LOCAL_ONLY = (
    "{} would attend within this rank's shard only. Use F.scaled_dot_product_attention(..., is_causal=True) or "
    "lightning_longctx.attend, or train with context=1."
)
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


@contextmanager
def intercepted(records: Sequence[SequenceRecord]) -> Iterator[None]:
    """While open, attention calls see the whole sequence of which this rank holds a shard.

    Open it around forward *and* backward: checkpointing recomputes attention in backward. Where no record spans several
    ranks, only causal calls with dropout are changed, so that one rank drops what several would.

    Args:
        records: The ``sequence`` entries of the step's batch. A call belongs to the one with as many local tokens.
    """
    if not records:
        yield
        return
    spread = [record for record in records if record.num_ranks * record.head > 1]
    attention = _Attention(spread) if spread else _Dropping(records)
    with ExitStack() as stack:
        for module, name, function in _bindings(len(sys.modules)):
            if function is _SDPA or spread:
                setattr(module, name, attention if function is _SDPA else _refuse_flex)
                stack.callback(setattr, module, name, function)
        if spread:
            stack.enter_context(_Mode(attention))
        yield


@lru_cache(maxsize=1)
def _bindings(num_modules: int) -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Every module-level name bound to a function we replace, such as ``from ... import scaled_dot_product_attention``.

    Looked up again only when modules were imported since. PyTorch's own modules are left alone, but for the two that
    users call.
    """
    _upstream.fill_function_tables()
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    wanted = [_SDPA, *([flex.flex_attention] if flex else [])]
    homes = (F, flex)
    return [
        (module, name, value)
        for module in list(sys.modules.values())
        if module in homes or not getattr(module, "__name__", "torch").startswith(("torch", __name__))
        for name, value in list(vars(module).items())
        if any(value is function for function in wanted)
    ]


class _Mode(TorchFunctionMode):
    """Sees what replaced names cannot: functions kept in closures or attributes, and other fused attention.

    A mode alone would not do: it is off inside functions that PyTorch wrote in Python, such as
    ``F.multi_head_attention_forward`` and ``Tensor.backward`` with what checkpointing recomputes there.
    """

    def __init__(self, attention: _Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self._attention(*args, **kwargs)
        _refuse_other_attention(func, args, kwargs)
        return func(*args, **kwargs)


class _Attention:
    """Stands in for ``F.scaled_dot_product_attention``."""

    def __init__(self, records: Sequence[SequenceRecord]) -> None:
        self._records = records

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError(
                "scaled_dot_product_attention got attn_mask, but this rank holds only a shard of the sequence and the "
                "mask says nothing about the rest. Pass is_causal=True and no mask (padding at the end of a row needs "
                "none), or train with context=1."
            )
        if not is_causal:
            raise ValueError(
                "scaled_dot_product_attention was called with is_causal=False: over a sharded sequence only causal "
                "attention is supported. Pass is_causal=True, or train with context=1."
            )
        query, key, value = _broadcast(query, key, value, enable_gqa)
        record = self._record(query.shape[2])
        if dropout_p > 0 and record.tensor > 1:
            raise ValueError(
                f"scaled_dot_product_attention was called with dropout_p={dropout_p} and does not say which of all "
                f"heads these {query.shape[1]} are, which dropout over tensor={record.tensor} goes by. Call "
                "lightning_longctx.attend(..., num_heads=ALL), pass dropout_p=0, or train with tensor=1."
            )
        # What the call says, as on one process: causal over whole rows. It knows nothing of packed documents.
        options = AttentionOptions(Mask(causal=True, isolate=False), scale, dropout_p=dropout_p)
        return attend_masked(query, key, value, options, sequence=record)

    def _fitting(self, num_tokens: int) -> list[SequenceRecord]:
        """Records of as many local tokens, one of each way to cut them."""
        fitting = (record for record in self._records if record.num_local_tokens == num_tokens)
        return list({(record.length, record.layout, record.documents): record for record in fitting}.values())

    def _record(self, num_tokens: int) -> SequenceRecord:
        plans = self._fitting(num_tokens)
        if len(plans) == 1:
            return plans[0]
        held = sorted({record.num_local_tokens for record in self._records})
        raise ValueError(
            f"attention over {num_tokens} tokens, but the batch's sequences have {held} tokens on this rank: "
            + ("more than one of them fits" if plans else "none fits")
            + ". Call lightning_longctx.attend(..., sequence=batch['sequence']) to say which sequence is meant."
        )


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, ...]:
    """Repeat batches and heads of size 1, as PyTorch's call does."""
    if not query.ndim == key.ndim == value.ndim == 4:
        return query, key, value  # `attend` says what is wrong
    dims = 1 if enable_gqa else 2
    sizes = [tensor.shape[:dims] for tensor in (query, key, value)]
    if any(len({*column} - {1}) > 1 for column in zip(*sizes, strict=True)):
        hint = "" if enable_gqa else " Grouped heads need enable_gqa=True."
        raise ValueError(f"query, key and value of [batch, heads] {[tuple(s) for s in sizes]} do not fit.{hint}")
    whole = torch.broadcast_shapes(*sizes)
    query, key, value = (tensor.expand(*whole, *tensor.shape[dims:]) for tensor in (query, key, value))
    return query, key, value


class _Dropping(_Attention):
    """The same on one rank that holds whole sequences, for causal calls with dropout; others are PyTorch's own."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        ours = dropout_p > 0 and is_causal and attn_mask is None and query.ndim == key.ndim == 4
        ours = ours and query.shape[2] == key.shape[2] and key.shape == value.shape
        if ours and len(self._fitting(query.shape[2])) == 1:
            return super().__call__(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


def _refuse_other_attention(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Attention that would silently see this rank's shard only."""
    if func is F.multi_head_attention_forward:
        bound = _MULTI_HEAD.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["need_weights"]:
            raise ValueError(
                "nn.MultiheadAttention was called with need_weights=True, which needs the whole score matrix. Pass "
                "need_weights=False and is_causal=True, or train with context=1."
            )
    if func in _upstream.FUSED_ATTENTION:
        raise ValueError(_LOCAL_ONLY.format(func.__name__))


def _refuse_flex(*args: Any, **kwargs: Any) -> None:
    raise ValueError(_LOCAL_ONLY.format("flex_attention"))
