"""One attention call to measure: sizes, mask and how it is spread, with its inputs and what should come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_longctx.cli.bench.masks import BenchMask, parse_mask
from lightning_longctx.plan.communication import Communication
from lightning_longctx.plan.shape import AttentionShape
from lightning_longctx.sequence import LayoutName, Ranges
from lightning_longctx.sequence.documents import Documents
from lightning_longctx.topology.degrees import Degrees, Placement

_SMALL_TOKENS = 256
_TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 1e-2, "float16": 1.5e-3}


@dataclass(frozen=True)
class AttentionCase:
    """One attention call on a whole sequence, batch 1; options as in ``AttentionBench``."""

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    dtype: str
    mask: str = "causal"
    layout: LayoutName = "zigzag"
    inner_ring: int | None = None
    backend: str = "auto"
    head: int = 1
    placement: Placement = "head_first"
    communication: Communication = Communication()

    @property
    def degrees(self) -> Degrees:
        """Context and head ranks."""
        context = self.ranks // self.head
        return Degrees(data=1, context=context, inner_ring=self.inner_ring, head=self.head, placement=self.placement)

    @property
    def shape(self) -> AttentionShape:
        """Sizes of the whole attention, as plans count with them."""
        item_size = getattr(torch, self.dtype).itemsize
        return AttentionShape(self.heads, self.kv_heads, self.width, item_size, max(item_size, 4))

    @property
    def tolerance(self) -> float:
        """See ``Case.tolerance``. What is rounded to be sent counts too."""
        return max(_TOLERANCES[self.dtype], _TOLERANCES[self.communication.dtype or self.dtype])

    @cached_property
    def visible(self) -> BenchMask:
        """The mask, parsed."""
        return parse_mask(self.mask)

    @cached_property
    def documents(self) -> Documents:
        """Cumulative lengths of packed documents; empty if nothing is packed."""
        return self.visible.documents(self.tokens)

    def small(self) -> AttentionCase:
        """About 256 tokens, which divide among the ranks only if the original ones do."""
        chunks = 2 * self.ranks
        tokens = max(_SMALL_TOKENS, 8 * chunks) // chunks * chunks + self.tokens % chunks
        if tokens >= self.tokens:
            return self
        return replace(self, tokens=tokens, mask=str(self.visible.scaled(tokens)))

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
        return [tensor.requires_grad_() for tensor in tensors[:3]] + tensors[3:]

    def expected(self) -> dict[str, Tensor]:
        """Plain masked softmax on the same inputs in float64."""
        inputs = [tensor.detach().double() for tensor in self.inputs(whole_sequence)]
        leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
        mask = dense_mask(self.visible, self.tokens)
        with sdpa_kernel(SDPBackend.MATH):
            return forward_backward(
                lambda q, k, v: scaled_dot_product(q, k, v, attn_mask=mask, enable_gqa=True), leaves, inputs[3]
            )


# Taken at import: torch's own context parallelism replaces the name in ``F`` while it computes.
scaled_dot_product = F.scaled_dot_product_attention


def dense_mask(mask: BenchMask, tokens: int) -> Tensor:
    """Which keys each query sees, [tokens, tokens] bool (query, key): what all systems are held to."""
    index = torch.arange(tokens)
    distance = index[:, None] - index
    allowed = torch.ones(tokens, tokens, dtype=torch.bool)
    if mask.mask.causal:
        allowed &= distance >= 0
    if mask.mask.window is not None:
        allowed &= distance < mask.mask.window
    if mask.kind == "documents":
        lengths = torch.tensor([stop - start for start, stop in pairwise(mask.documents(tokens))])
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        allowed &= document[:, None] == document
    return allowed


def forward_backward(attention: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients by name."""
    out = attention(*leaves)
    grads = torch.autograd.grad(out, leaves, grad)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def take(whole: Tensor, ranges: Ranges) -> Tensor:
    """A rank's part [1, heads, its tokens, width] of a whole tensor."""
    return torch.cat([whole[:, :, piece.start : piece.stop : piece.step] for piece in ranges], dim=2)


def whole_sequence(tensor: Tensor) -> Tensor:
    """The part of a rank that has everything."""
    return tensor
