"""Our own Triton kernels: any band, documents, softcap and dropout, all tiles of a step in one launch."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.attention.backends.contract import Needs, Scores, Tiles
from lightning_longctx.attention.backends.dropping import threshold
from lightning_longctx.plan.tiles import Tile

_CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTH = 256


class Triton:
    """Flash attention over a tile table (``kernels/attention.py``); on CPU only in Triton's interpreter, for tests."""

    name = "triton"
    takes_tables = True

    def refusal(self, needs: Needs) -> str | None:
        """See ``Backend.refusal``."""
        device, dtype = needs.device.type, needs.dtype
        if device not in ("cpu", "cuda"):
            return f"our kernels are for CUDA, not for device type {device}"
        if find_spec("triton") is None:
            return "triton is not installed: pip install triton"
        if device == "cpu" and not _load("jit").interpreting():
            return "Triton computes on cpu only in its interpreter, which is for tests: set TRITON_INTERPRET=1"
        if dtype not in (_CUDA_DTYPES if device == "cuda" else (*_CUDA_DTYPES, torch.float64)):
            return f"no {dtype} on {device}"
        if needs.width > _WIDTH:
            return f"head width {needs.width} is over {_WIDTH}"
        return None

    def parts(self, tile: Tile, device: torch.device, dtype: torch.dtype, *, backward: bool = False) -> Tiles:
        """Any band as it is."""
        return (tile,)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scores: Scores) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        return _load("attention").forward(query, key, value, tiles, _weighing(scores))

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
        return _load("attention").backward(grad, query, key, value, out, lse, tiles, _weighing(scores))


@lru_cache
def _load(name: str) -> Any:
    """A module of ``kernels/``, when it is wanted: it needs Triton, which is an optional dependency."""
    return import_module(f"lightning_longctx.kernels.{name}")


def _weighing(scores: Scores) -> Any:
    kernels, dropout = _load("attention"), scores.dropout
    drops = dropout and kernels.Drops(dropout.p, threshold(dropout.p), dropout.rows, dropout.keys)
    return kernels.Weighing(scores.scale, scores.softcap, drops)
