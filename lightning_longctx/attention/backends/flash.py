"""The packages flash-attn and flash-attn-4: attention over packed sequences, with windows and softcap, on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch
from packaging.version import Version
from torch import Tensor

from lightning_longctx import _upstream
from lightning_longctx.attention.backends.contract import Needs, Scores, Tiles
from lightning_longctx.attention.backends.packed import (
    Kernel,
    Sequences,
    capability,
    packed_backward,
    packed_forward,
    packed_refusal,
)
from lightning_longctx.plan.rounds import aligned_parts
from lightning_longctx.plan.tiles import Tile


class Library(Kernel, Protocol):
    """A version of flash-attn."""

    def refusal(self, needs: Needs) -> str | None:
        """Why it cannot compute that, beyond what none of them can; None if it can."""
        ...


class FlashAttn2:
    """``flash-attn`` 2.7 and 2.8, whose low-level functions have one signature (``flash_attn_interface.py``)."""

    def refusal(self, needs: Needs) -> str | None:
        return _missing("flash-attn", "2.7", "3", _upstream.flash_attn_2)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        call, _ = _upstream.flash_attn_2()
        options = (0.0, scores.scale, sequences.causal, *sequences.window, scores.softcap or 0.0)
        return call(query, key, value, *sequences[:4], *options)[:2]

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
        _, call = _upstream.flash_attn_2()
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        options = (0.0, scores.scale, sequences.causal, *sequences.window, scores.softcap or 0.0)
        deterministic = torch.are_deterministic_algorithms_enabled()
        call(grad, query, key, value, out, lse, *results, *sequences[:4], *options, None, deterministic)
        return results


class FlashAttn4:
    """``flash-attn-4``, from 4.0.0b36 on (``flash_attn/cute/interface.py``): for Hopper and Blackwell."""

    def refusal(self, needs: Needs) -> str | None:
        found = capability(needs.device)
        if found is not None and found[0] not in (9, 10, 11):
            return f"flash-attn-4 is for compute capability 9 to 11, this GPU has {found[0]}.{found[1]}"
        if found is not None and found[0] > 9 and 128 < needs.width != 256:
            return f"flash-attn-4 knows no head width {needs.width} on this GPU"
        if found is not None and found[0] > 9 and needs.width == 256 and needs.softcap:
            return "flash-attn-4 knows no softcap for head width 256 on this GPU"
        return _missing("flash-attn-4", "4.0.0b36", "5", _upstream.flash_attn_4)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        call, _ = _upstream.flash_attn_4()
        return call(query, key, value, **_options_of_4(sequences, scores), return_lse=True)[:2]

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
        _, call = _upstream.flash_attn_4()
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = _options_of_4(sequences, scores)
        return call(query, key, value, out, grad, lse, **options, deterministic=deterministic)


class Flash:
    """The first of flash-attn's versions that accepts.

    Args:
        libraries: In this order.
    """

    name = "flash"
    takes_tables = True

    def __init__(self, libraries: tuple[Library, ...] = (FlashAttn4(), FlashAttn2())) -> None:
        self._libraries = libraries

    def refusal(self, needs: Needs) -> str | None:
        """See ``Backend.refusal``."""
        if reason := packed_refusal(needs):
            return reason
        reasons = [library.refusal(needs) for library in self._libraries]
        return None if None in reasons else ", ".join(reason for reason in reasons if reason)

    def parts(self, tile: Tile, device: torch.device, dtype: torch.dtype, *, backward: bool = False) -> Tiles:
        """See ``Backend.parts``."""
        return aligned_parts(tile)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scores: Scores) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        return packed_forward(self._library(query, scores), query, key, value, tiles, scores)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Backend.backward``."""
        library = self._library(query, scores)
        return packed_backward(library, grad, query, key, value, out, lse, tiles, scores)

    def _library(self, query: Tensor, scores: Scores) -> Library:
        needs = Needs(query.device, query.dtype, query.shape[-1], softcap=scores.softcap is not None)
        return _first(self._libraries, needs)


@lru_cache(maxsize=64)
def _first(libraries: tuple[Library, ...], needs: Needs) -> Library:
    return next(library for library in libraries if library.refusal(needs) is None)


def _missing(package: str, least: str, below: str, load: Callable[[], object]) -> str | None:
    """Why a package cannot be used; None if it can. Where there is a GPU, that is tried."""
    wanted = f"pip install '{package}>={least},<{below}'"
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed: {wanted}"
    if not Version(least) <= Version(found) < Version(below):
        return f"{package} {found} is not from {least} on and below {below}: {wanted}"
    try:
        if torch.cuda.is_available():
            load()
    except ImportError as problem:
        return f"{package} {found} cannot be imported ({problem}): {wanted}"
    return None


def _options_of_4(sequences: Sequences, scores: Scores) -> dict[str, object]:
    left, right = (None if limit < 0 else limit for limit in sequences.window)
    return {
        "softmax_scale": scores.scale,
        "causal": sequences.causal,
        "softcap": scores.softcap or 0.0,
        "window_size_left": left,
        "window_size_right": right,
        "cu_seqlens_q": sequences.query_ends,
        "cu_seqlens_k": sequences.key_ends,
        "max_seqlen_q": sequences.most_queries,
        "max_seqlen_k": sequences.most_keys,
    }
