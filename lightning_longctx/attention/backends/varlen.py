"""PyTorch's ``torch.nn.attention.varlen``: flash attention over packed sequences, with windows, on CUDA."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from lightning_longctx import _upstream
from lightning_longctx.attention.backends.contract import Needs, Scores, Tiles
from lightning_longctx.attention.backends.packed import Sequences, packed_backward, packed_forward, packed_refusal
from lightning_longctx.plan.rounds import aligned_parts
from lightning_longctx.plan.tiles import Tile


class Varlen:
    """``varlen_attn`` for tables of tiles: documents and windows cost one call, not one for each."""

    name = "varlen"
    takes_tables = True

    def refusal(self, needs: Needs) -> str | None:
        """See ``Backend.refusal``."""
        return packed_refusal(needs) or ("PyTorch's varlen attention knows no softcap" if needs.softcap else None)

    def parts(self, tile: Tile, device: torch.device, dtype: torch.dtype, *, backward: bool = False) -> Tiles:
        """See ``Backend.parts``."""
        return aligned_parts(tile)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scores: Scores) -> tuple[Tensor, Tensor]:
        """See ``Backend.forward``."""
        return packed_forward(_TorchVarlen(), query, key, value, tiles, scores)

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
        return packed_backward(_TorchVarlen(), grad, query, key, value, out, lse, tiles, scores)


class _TorchVarlen:
    """The kernel; signatures of torch 2.11 to 2.13 (``torch/nn/attention/varlen.py``), whose lse is [Hq, n]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        call, _ = _upstream.varlen_attention()
        aux = inspect.getmodule(call).AuxRequest(lse=True)  # type: ignore[union-attr]
        # torch 2.11 takes grouped heads without being told.
        grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(call).parameters else {}
        window = tuple(sequences.window)
        return call(
            query, key, value, *sequences[:4], return_aux=aux, scale=scores.scale, window_size=window, **grouped
        )

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
        _, call = _upstream.varlen_attention()
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # random numbers of a dropout that is off
        tensors, options = (grad, query, key, value, out, lse), (scores.scale, list(sequences.window))
        return call(*tensors, *sequences[:4], sequences.causal, unused, *options)
