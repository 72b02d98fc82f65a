"""Systems that compute causal attention, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_longctx.attention import attend, close_ring, open_ring
from lightning_longctx.attention.transport import find_ring
from lightning_longctx.cli.bench.systems import Job, System
from lightning_longctx.sequence import LayoutName, Ranges, SequenceRecord
from lightning_longctx.topology import Degrees

_SMALL_TOKENS = 256
_TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 1e-2, "float16": 1.5e-3}
# A rank may wait for a slower one as long as it takes: the command notices a dead one by itself.
_PATIENCE = timedelta(hours=24)


@dataclass(frozen=True)
class AttentionCase:
    """One attention call on a whole sequence, batch 1; options as in ``AttentionBench``."""

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    dtype: str
    mask: str
    layout: LayoutName
    inner_ring: int | None
    backend: str

    @property
    def degrees(self) -> Degrees:
        """All ranks are context ranks."""
        return Degrees(data=1, context=self.ranks, inner_ring=self.inner_ring)

    @property
    def tolerance(self) -> float:
        """See ``Case.tolerance``."""
        return _TOLERANCES[self.dtype]

    def small(self) -> AttentionCase:
        """About 256 tokens, which divide among the ranks only if the original ones do."""
        chunks = 2 * self.ranks
        tokens = max(_SMALL_TOKENS, 8 * chunks) // chunks * chunks + self.tokens % chunks
        return replace(self, tokens=min(self.tokens, tokens))

    def inputs(self, part: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """This rank's part of query, key, value (leaves) and the gradient of the output.

        Args:
            part: Cuts a whole tensor [1, heads, tokens, width].
        """
        generator = torch.Generator().manual_seed(0)
        tensors = []
        for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads):
            whole = torch.randn(1, heads, self.tokens, self.width, generator=generator)
            # In memory token-major, as a model's projections leave them.
            token_major = part(whole).to(getattr(torch, self.dtype)).transpose(1, 2).contiguous()
            tensors.append(token_major.transpose(1, 2))
        return [tensor.requires_grad_() for tensor in tensors[:3]] + [tensors[3].contiguous()]

    def expected(self) -> dict[str, Tensor]:
        """Plain masked softmax on the same inputs in float64."""
        inputs = [tensor.detach().double() for tensor in self.inputs(_whole)]
        leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
        with sdpa_kernel(SDPBackend.MATH):
            return _forward_backward(_sdpa, leaves, inputs[3])


@dataclass(frozen=True)
class SingleProcess:
    """PyTorch's own flash attention on the whole sequence, in one process with one thread."""

    name: str = "single"

    def num_ranks(self, case: AttentionCase) -> int:
        """One."""
        return 1

    def describe(self, case: AttentionCase) -> dict[str, str]:
        """Nothing is laid out or sent."""
        return {"layout": "", "schedule": ""}

    def setup(self, case: AttentionCase, rank: int) -> Job:
        """See ``System.setup``."""
        *leaves, grad = case.inputs(_whole)

        def run() -> dict[str, Tensor]:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return _forward_backward(_sdpa, leaves, grad)

        return Job(run, _whole, dict, lambda: None)


@dataclass(frozen=True)
class RingAttention:
    """This package: a (double) ring over all ranks."""

    name: str = "longctx"

    def num_ranks(self, case: AttentionCase) -> int:
        """All."""
        return case.ranks

    def describe(self, case: AttentionCase) -> dict[str, str]:
        """A double ring says how many inner rings of how many ranks."""
        windows, inner = case.degrees.windows, case.degrees.inner
        return {"layout": case.layout, "schedule": "flat" if windows == 1 else f"double {windows}x{inner}"}

    def setup(self, case: AttentionCase, rank: int) -> Job:
        """See ``System.setup``."""
        ring = open_ring(case.degrees, rank, _PATIENCE)
        record = SequenceRecord(
            length=case.tokens,
            layout=case.layout,
            num_ranks=case.ranks,
            inner_ring=case.degrees.inner,
            rank=rank,
            ring=ring,
            backend=case.backend,
        )
        *leaves, grad = case.inputs(lambda whole: _take(whole, record.ranges))
        transport = find_ring(ring)

        def run() -> dict[str, Tensor]:
            return _forward_backward(lambda *inputs: attend(*inputs, sequence=record), leaves, grad)

        def sent_bytes() -> Mapping[str, int]:
            return Counter(transport.sent_bytes) if transport else {}

        return Job(run, lambda whole: _take(whole, record.ranges), sent_bytes, lambda: close_ring(ring))


def attention_systems() -> tuple[System, ...]:
    """What ``bench attention`` compares; ``single`` comes first, since the others are measured against it."""
    return (SingleProcess(), RingAttention())


def _forward_backward(attention: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    out = attention(*leaves)
    grads = torch.autograd.grad(out, leaves, grad)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _take(whole: Tensor, ranges: Ranges) -> Tensor:
    return torch.cat([whole[:, :, piece.start : piece.stop : piece.step] for piece in ranges], dim=2)


def _whole(tensor: Tensor) -> Tensor:
    return tensor
