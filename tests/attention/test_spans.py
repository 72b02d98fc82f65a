"""Slices of tokens as a batch, and marks on what was written."""

import torch

from lightning_longctx.attention.spans import batched, in_a_row
from lightning_longctx.attention.sums import TokenSum
from lightning_longctx.attention.written import Part, Written
from lightning_longctx.plan.stacks import Span


def test_slices_are_views_into_the_tokens():
    tensor = torch.arange(2 * 10 * 3.0).view(1, 2, 10, 3)
    slices = batched(tensor, Span(1, 2, 3, 3))
    assert slices.shape == (3, 2, 2, 3)
    for i in range(3):
        assert torch.equal(slices[i], tensor[0, :, 1 + 3 * i : 3 + 3 * i])
    slices.zero_()
    assert tensor[0, 0, :, 0].eq(0).nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 7, 8]
    rows = batched(tensor[..., 0], Span(0, 5, 2, 5))
    assert torch.equal(in_a_row(rows), tensor[..., 0])
    whole = batched(tensor, Span(0, 5, 2, 5))
    assert torch.equal(in_a_row(whole), tensor)


def test_marks_come_back_as_few_parts():
    written = Written(12)
    assert written.mark(Span(2, 3, 2, 5)) == [Part(0, 2, 0, 3, True)]
    assert written.mark(Span(2, 3, 2, 5)) == [Part(0, 2, 0, 3, False)]
    assert written.mark(Span(0, 6, 2, 6)) == [
        Part(0, 1, 0, 2, True),
        Part(0, 1, 2, 5, False),
        Part(0, 1, 5, 6, True),
        Part(1, 1, 0, 1, True),
        Part(1, 1, 1, 4, False),
        Part(1, 1, 4, 6, True),
    ]
    assert written.gaps() == []
    assert Written(3).gaps() == [(0, 3)]


def test_sums_store_first_and_add_later():
    total = TokenSum(torch.empty(1, 2, 9, 1))
    total.add(Span(0, 2, 2, 4), torch.ones(2, 2, 2, 1))
    total.add(Span(1, 4, 1, 0), torch.ones(1, 2, 4, 1))
    assert total.total()[0, 0].flatten().tolist() == [1, 2, 1, 1, 2, 1, 0, 0, 0]
