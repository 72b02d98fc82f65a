"""Turns ``F.scaled_dot_product_attention`` into ring attention inside a step, and refuses what cannot be honoured."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_longctx import _upstream
from lightning_longctx.attention.attend import attend_masked
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
    ranks, nothing is changed.

    Args:
        records: The ``sequence`` entries of the step's batch. A call belongs to the one with as many local tokens.
    """
    spread = [record for record in records if record.num_ranks * record.head > 1]
    if not spread:
        yield
        return
    attention = _Attention(spread)
    with ExitStack() as stack:
        for module, name, function in _bindings(len(sys.modules)):
            setattr(module, name, attention if function is _SDPA else _refuse_flex)
            stack.callback(setattr, module, name, function)
        stack.enter_context(_Mode(attention))
        yield


@lru_cache(maxsize=1)
def _bindings(num_modules: int) -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Every module-level name bound to a function we replace, such as ``from ... import scaled_dot_product_attention``.

    Looked up again only when modules were imported since. PyTorch's own modules are left alone, but for the two that
    users call.
    """
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
        if dropout_p > 0:
            raise ValueError(
                f"scaled_dot_product_attention got dropout_p={dropout_p}: attention dropout over a sharded sequence is "
                "not supported. Use dropout_p=0, or train with context=1."
            )
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(f"{query.shape[1]} query heads and {key.shape[1]} key/value heads need enable_gqa=True.")
        # What the call says, as on one process: causal over whole rows. It knows nothing of packed documents.
        mask = Mask(causal=True, isolate=False)
        return attend_masked(query, key, value, mask, sequence=self._record(query.shape[2]), scale=scale)

    def _record(self, num_tokens: int) -> SequenceRecord:
        fitting = {record for record in self._records if record.num_local_tokens == num_tokens}
        plans = {(record.length, record.layout, record.documents) for record in fitting}
        if len(plans) == 1:
            return next(iter(fitting))
        held = sorted({record.num_local_tokens for record in self._records})
        raise ValueError(
            f"attention over {num_tokens} tokens, but the batch's sequences have {held} tokens on this rank: "
            + ("more than one of them fits" if plans else "none fits")
            + ". Call lightning_longctx.attend(..., sequence=batch['sequence']) to say which sequence is meant."
        )


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
