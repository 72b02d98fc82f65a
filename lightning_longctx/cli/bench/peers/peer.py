"""One way in which another package computes the case: data, and two functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_longctx.cli.bench.attention_case import AttentionCase, forward_backward, take
from lightning_longctx.cli.bench.peers.traffic import count_sent
from lightning_longctx.cli.bench.systems import Job
from lightning_longctx.sequence import LayoutName, SequenceRecord

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query [1, tokens, heads, width], key and value of this rank to its output, differentiable."""


def no_exchange(case: AttentionCase) -> int:
    """Every rank keeps its heads."""
    return 1


def contiguous(case: AttentionCase) -> LayoutName:
    """A layout whatever the case."""
    return "contiguous"


def zigzag(case: AttentionCase) -> LayoutName:
    """A layout whatever the case."""
    return "zigzag"


@dataclass(frozen=True)
class Peer:
    """A system of the bench (see ``System``) that another package computes.

    Args:
        name: As the ``system`` column has it.
        package: Top-level module that has to be there.
        install: How it comes there.
        refusal: Why it cannot compute a case; None if it can.
        build: Its attention for a case, on one rank; a collective.
        layout: Of its tokens, as ours are called.
        schedule: A word for the column.
        head: Ranks among which it exchanges heads.
    """

    name: str
    package: str
    install: str
    refusal: Callable[[AttentionCase], str | None]
    build: Callable[[AttentionCase, int], Attention]
    layout: Callable[[AttentionCase], LayoutName]
    schedule: str
    head: Callable[[AttentionCase], int] = no_exchange

    def num_ranks(self, case: AttentionCase) -> int:
        """All."""
        return case.ranks

    def describe(self, case: AttentionCase) -> dict[str, str]:
        """See ``System.describe``."""
        return {"layout": self.layout(case), "schedule": self.schedule}

    def setup(self, case: AttentionCase, rank: int) -> Job:
        """See ``System.setup``; runs once, to count what is sent: the same in every run."""
        head = self.head(case)
        record = SequenceRecord(
            length=case.tokens,
            layout=self.layout(case),
            num_ranks=case.ranks // head,
            rank=rank // head,
            head=head,
            head_rank=rank % head,
            documents=case.documents,
        )
        *leaves, grad = case.inputs(lambda whole: take(whole, record.ranges))
        attention = self.build(case, rank)

        def token_major(*tensors: Tensor) -> Tensor:
            return attention(*(tensor.transpose(1, 2) for tensor in tensors)).transpose(1, 2)

        per_run = count_sent(lambda: forward_backward(token_major, leaves, grad), rank, ranks_per_node(case))
        total: Counter[str] = Counter()

        def run() -> dict[str, Tensor]:
            total.update(per_run)
            return forward_backward(token_major, leaves, grad)

        def sent_bytes() -> Mapping[str, int]:
            return total

        return Job(run, lambda whole: take(whole, record.ranges), sent_bytes, lambda: None)


def ranks_per_node(case: AttentionCase) -> int:
    """Neighbours that one inner ring of ours would join: messages between them are ``inner``, others ``outer``."""
    return case.ranks // case.degrees.windows


def refuses(case: AttentionCase, *kinds: str, even: int) -> str | None:
    """Why a peer that knows only some masks, and needs lengths that divide, cannot compute a case.

    Args:
        case: What to compute.
        kinds: Masks it knows.
        even: What the sequence, and each document of a packed one, has to divide by.
    """
    if case.visible.kind not in kinds:
        return f"does not compute mask={case.mask} on CPU"
    if case.tokens % even:
        return f"needs tokens that divide by {even}"
    return None
