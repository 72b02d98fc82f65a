import torch

from lightning_longctx.batch import count_valid, shift_labels


def test_every_position_predicts_the_next_token() -> None:
    labels = torch.tensor([[1, 2, -100, 4], [5, 6, 7, 8]])
    assert shift_labels(labels).tolist() == [[2, -100, 4, -100], [6, 7, 8, -100]]


def test_one_token_predicts_nothing() -> None:
    assert shift_labels(torch.tensor([[3]])).tolist() == [[-100]]


def test_another_ignored_label_and_dtype() -> None:
    shifted = shift_labels(torch.tensor([[1, 2]], dtype=torch.int32), ignore=-1)
    assert shifted.tolist() == [[2, -1]]
    assert shifted.dtype == torch.int32


def test_count_valid() -> None:
    assert count_valid(torch.tensor([[2, -100, 0], [-100, -100, -100]])) == 2
