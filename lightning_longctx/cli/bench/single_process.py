"""The yardstick: what PyTorch itself needs in one process, doing visible work only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_longctx import _upstream
from lightning_longctx.cli.bench.attention_case import (
    AttentionCase,
    forward_backward,
    scaled_dot_product,
    whole_sequence,
)
from lightning_longctx.cli.bench.systems import Job

Pieces = list[dict[str, Tensor]]


@dataclass(frozen=True)
class SingleProcess:
    """PyTorch's own flash attention on the whole sequence, in one process with one thread.

    Packed documents are computed one by one: nothing is computed that is not seen. For a window PyTorch has no fast
    operation on CPU, so plain causal attention is computed; ``scale`` says by what its time is to be multiplied.
    """

    name: str = "single"

    def num_ranks(self, case: AttentionCase) -> int:
        """One."""
        return 1

    def describe(self, case: AttentionCase) -> dict[str, str]:
        """Nothing is laid out or sent."""
        return {"layout": "", "schedule": ""}

    def scale(self, case: AttentionCase) -> float:
        """Visible pairs over computed pairs: below 1 for a window only."""
        computed = replace(case, mask="causal").visible if case.visible.kind == "window" else case.visible
        return case.visible.visible_pairs(case.tokens) / computed.visible_pairs(case.tokens)

    def setup(self, case: AttentionCase, rank: int) -> Job:
        """See ``System.setup``."""
        *leaves, grad = case.inputs(whole_sequence)
        if case.documents:
            pieces = [slice(start, stop) for start, stop in pairwise(case.documents)]
            run = _document_by_document([tensor.detach() for tensor in leaves], grad, pieces)
            return Job(run, whole_sequence, dict, lambda: None, finish=_joined)

        causal = case.visible.mask.causal

        def run_flash() -> dict[str, Tensor]:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return forward_backward(
                    lambda q, k, v: scaled_dot_product(q, k, v, is_causal=causal, enable_gqa=True), leaves, grad
                )

        computed = replace(case, mask="causal" if causal else "full")
        return Job(run_flash, whole_sequence, dict, lambda: None, expected=computed.expected)


def _document_by_document(inputs: list[Tensor], grad: Tensor, pieces: list[slice]) -> Callable[[], Pieces]:
    """Forward and backward of each document; below autograd, whose bookkeeping would weigh on short ones."""
    names = ("out", "dq", "dk", "dv")

    def run() -> Pieces:
        results = []
        for piece in pieces:
            parts = [tensor[:, :, piece] for tensor in inputs]
            out, lse = _upstream.flash_attention_cpu(*parts, 0.0, True)
            grads = _upstream.flash_attention_cpu_backward(grad[:, :, piece], *parts, out, lse, 0.0, True)
            results.append(dict(zip(names, (out, *grads), strict=True)))
        return results

    return run


def _joined(pieces: Pieces) -> dict[str, Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces], dim=2) for name in pieces[0]}
