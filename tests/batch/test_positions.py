"""Documents found in a batch's own positions."""

from __future__ import annotations

import pytest
import torch

from lightning_longctx.batch.positions import document_starts, find_documents, row_positions


@pytest.mark.parametrize(
    ("rows", "documents", "num_rows"),
    [
        ([[0, 1, 2, 3]], (), 1),
        ([[5, 6, 7, 8], [0, 1, 2, 3]], (), 1),
        ([[0, 1, 0, 1]], (0, 2, 4), 1),
        ([[0, 1, 0, 1], [0, 1, 7, 8]], (0, 2, 4), 1),
        ([[0, 0, 0, 1]], (0, 1, 2, 4), 1),
        ([[0, 1, 0, 1], [0, 1, 2, 3]], (0, 2, 4, 8), 2),
        ([[0], [0]], (), 1),
    ],
)
def test_rows_alike_are_one_row(rows: list[list[int]], documents: tuple[int, ...], num_rows: int) -> None:
    positions = torch.tensor(rows)
    assert find_documents(positions) == (documents, num_rows)
    ends = documents or (0, len(rows[0]))
    length = len(rows[0])
    expected = [
        [(row * length if num_rows > 1 else 0) + place in ends for place in range(length)] for row in range(len(rows))
    ]
    assert document_starts(positions).tolist() == expected


def test_positions_become_rows() -> None:
    for shape in ((3,), (1, 3), (2, 3)):
        got = row_positions(torch.tensor([4, 5, 0], dtype=torch.int32).expand(shape), (2, 3))
        assert got.dtype == torch.int64 and got.tolist() == [[4, 5, 0]] * 2
    three = torch.zeros(3, 2, 3, dtype=torch.int64)
    assert row_positions(three, (2, 3)) is three


def test_hidden_padding_never_makes_documents() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 1], [0, 1, 2, 0, 1], [3, 3, 3, 3, 3]])
    hidden = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    got = row_positions(positions, (3, 5), hidden)
    assert got.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 0, 1], [3, 4, 5, 6, 7]]
    assert find_documents(got) == ((0, 2, 5, 8, 10, 15), 3)


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (4,), ()])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"position_ids of shape .* must be \[S\], \[1, S\] or \[B, S\]"):
        row_positions(torch.zeros(shape), (2, 3))
