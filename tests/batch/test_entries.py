import pytest
import torch

from lightning_longctx.batch.entries import attention_padding, sequence_dim, tokens_shape

TOKENS = (2, 8)


@pytest.mark.parametrize(
    ("key", "shape", "dim"),
    [
        ("input_ids", (2, 8), 1),
        ("inputs_embeds", (2, 8, 8), 1),
        ("position_ids", (3, 2, 8), 2),
        ("loss_weight", (2, 8), 1),
        ("features", (2, 8, 5), 1),
        ("index", (2,), None),
        ("image", (2, 3, 16, 16), None),
        ("temperature", (), None),
        ("cu_seqlens", (3,), None),
    ],
)
def test_dims_that_leave_no_doubt(key: str, shape: tuple[int, ...], dim: int | None) -> None:
    assert sequence_dim(key, torch.zeros(shape), TOKENS, {}) == dim


@pytest.mark.parametrize("shape", [(8,), (1, 8), (8, 2), (2, 8, 8), (2, 4, 8, 8), (3, 2, 8)])
def test_a_doubtful_entry_names_the_option(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"'bias'.*sequence_dims: \{bias: \d\}.*sequence_dims: \{bias: null\}"):
        sequence_dim("bias", torch.zeros(shape), TOKENS, {})


def test_rows_of_the_same_number_as_tokens_are_doubtful() -> None:
    assert sequence_dim("mask", torch.zeros(8, 8), (8, 8), {}) == 1
    with pytest.raises(ValueError, match="sequence_dims"):
        sequence_dim("index", torch.zeros(8), (8, 8), {})


@pytest.mark.parametrize(("configured", "dim"), [(1, 1), (-1, 2), (None, None)])
def test_configured_dims_win(configured: int | None, dim: int | None) -> None:
    assert sequence_dim("bias", torch.zeros(2, 8, 8), TOKENS, {"bias": configured}) == dim


@pytest.mark.parametrize("configured", [0, 3, -4])
def test_a_configured_dim_must_fit(configured: int) -> None:
    with pytest.raises(ValueError, match=r"'bias' of shape \(2, 8, 8\).*sequence_dims"):
        sequence_dim("bias", torch.zeros(2, 8, 8), TOKENS, {"bias": configured})


def test_what_is_no_tensor_stays_whole_unless_configured() -> None:
    assert sequence_dim("text", ["a"] * 8, TOKENS, {}) is None
    assert sequence_dim("text", ["a"] * 8, TOKENS, {"text": None}) is None
    with pytest.raises(ValueError, match="text.*list, no tensor"):
        sequence_dim("text", ["a"] * 8, TOKENS, {"text": 0})


def test_known_entries_must_have_their_shape() -> None:
    with pytest.raises(ValueError, match=r"'position_ids' of shape \(2, 7\)"):
        sequence_dim("position_ids", torch.zeros(2, 7), TOKENS, {})


def test_tokens_shape() -> None:
    assert tokens_shape({"input_ids": torch.zeros(2, 8), "inputs_embeds": torch.zeros(2, 8, 4)}) == TOKENS
    assert tokens_shape({"inputs_embeds": torch.zeros(2, 8, 4)}) == TOKENS


@pytest.mark.parametrize("shape", [(8,), (2, 8, 4), (2, 0), (0, 8)])
def test_token_shapes_that_are_none(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"input_ids of shape .* must be \[B, S\]"):
        tokens_shape({"input_ids": torch.zeros(shape)})


def test_a_batch_without_tokens() -> None:
    with pytest.raises(ValueError, match=r"\['tokens'\].*neither a tensor input_ids"):
        tokens_shape({"tokens": torch.zeros(2, 8)})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padding_at_the_tail_is_found(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).to(dtype)
    hidden = attention_padding(mask, (3, 4))
    assert hidden is not None
    assert hidden.tolist() == (mask == 0).tolist()


def test_a_mask_of_ones_hides_nothing() -> None:
    assert attention_padding(torch.ones(2, 8), TOKENS) is None


@pytest.mark.parametrize("row", [[0, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 0]])
def test_padding_elsewhere_is_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match="attention_mask.*padding_side='right'"):
        attention_padding(torch.tensor([[1, 1, 1, 1], row]), (2, 4))


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 1, 8, 8), torch.ones(2, 7), torch.tensor([[0.0, -1e9]]).expand(2, 2).repeat(1, 4), None]
)
def test_masks_that_say_more_are_refused(mask: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match="attention_mask.*cannot be honoured"):
        attention_padding(mask, TOKENS)
