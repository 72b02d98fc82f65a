"""Banded attention in the interpreter: values and gradients against float64, and what must not leak."""

import math

import pytest
import torch

from lightning_longctx.attention.backends import Dropout, Scores
from lightning_longctx.attention.backends.dropping import keeps
from lightning_longctx.attention.backends.triton import Triton
from lightning_longctx.attention.merge import merge_
from lightning_longctx.plan.tiles import Tile, full_tile
from lightning_longctx.testing.tolerances import FLOAT64, assert_close_relative
from tests.attention.conformance import TABLES, causal, check_table, dense

pytestmark = pytest.mark.usefixtures("interpreter")
ENGINE = Triton()

SEVERAL_BLOCKS = {
    "causal": (causal(0, 40),),
    "band off the diagonal": (Tile(3, 37, 5, 48, 4, 20),),
    "window": (Tile(0, 40, 0, 40, -19, 0),),
    "documents": (causal(0, 1), causal(1, 18), causal(19, 2), causal(21, 20)),
    "pieces of one document": (full_tile(17, 40, 0, 13), causal(17, 23, 20), Tile(0, 16, 20, 43, -16, -3)),
}


@pytest.mark.parametrize("table", list(TABLES))
def test_small_tables(table):
    check_table(ENGINE, TABLES[table], torch.float64, 16, 1, heads=2, batch=1)


@pytest.mark.parametrize("table", list(SEVERAL_BLOCKS))
def test_several_blocks(table):
    check_table(ENGINE, SEVERAL_BLOCKS[table], torch.float64, 16, 1, heads=2, batch=1, softcap=2.0, dropout_p=0.4)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 80), (torch.bfloat16, 64), (torch.float16, 256)])
def test_dtypes_and_widths(dtype, width):
    check_table(ENGINE, (causal(0, 3), causal(3, 20)), dtype, width, 1, heads=1, batch=1)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 1), (3, 3, 24)])
def test_grouped_heads_and_odd_widths(heads, kv_heads, width):
    check_table(ENGINE, (causal(0, 9),), torch.float64, width, kv_heads, heads=heads, batch=2)


@pytest.mark.parametrize("p", [0.1, 0.7])  # thresholds on both sides of 2^31
def test_the_dropout_mask_bit_for_bit(p):
    """With one-hot values, ``out`` is the row of weights itself: what is 0 was dropped."""
    torch.manual_seed(1)
    query, key = (torch.randn(1, 2, 48, 16) for _ in range(2))
    value = torch.eye(48).expand(1, 2, 48, 48)
    query, key = (torch.nn.functional.pad(tensor, (0, 32)) for tensor in (query, key))
    dropout = Dropout(p, torch.randint(2**32, (1, 2, 48, 2)), torch.randint(2**32, (48,)))
    scores = Scores(0.1, dropout=dropout)
    out, lse = ENGINE.forward(query, key, value, (full_tile(0, 48, 0, 48),), scores)
    assert torch.equal(out != 0, keeps(dropout))
    expected, _ = dense(query.double(), key.double(), value.double(), (full_tile(0, 48, 0, 48),), scores)
    assert_close_relative(out, expected)
    # The same in backward: with grad = out the gradient of a value is a column of kept weights.
    _, _, dvalue = ENGINE.backward(value, query, key, value, out, lse, (full_tile(0, 48, 0, 48),), scores)
    assert torch.equal(dvalue.transpose(2, 3) != 0, keeps(dropout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit", [-20000.0, -65000.0])
def test_a_very_low_logit_still_beats_the_mask(dtype, logit):
    """A finite number for masked logits would let the masked second key (value 100) win."""
    query, key = torch.tensor([[[[logit], [0.0]]]]).to(dtype), torch.tensor([[[[1.0], [0.0]]]]).to(dtype)
    value, tiles = torch.tensor([[[[1.0], [100.0]]]]).to(dtype), (causal(0, 2),)
    out, lse = ENGINE.forward(query, key, value, tiles, Scores(1.0))
    assert out[0, 0, 0, 0] == 1.0 and lse[0, 0, 0] == query[0, 0, 0, 0]
    grad = torch.tensor([[[[1.0], [0.0]]]]).to(dtype)
    dvalue = ENGINE.backward(grad, query, key, value, out, lse, tiles, Scores(1.0))[2]
    assert dvalue.flatten().tolist() == [1.0, 0.0]


def test_rows_without_keys_are_nothing():
    """Blocks without a tile, and rows of a block that no tile covers, with what they hold in memory."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 1, 40, 16, dtype=torch.float64) for _ in range(4))
    tiles = (causal(4, 8), full_tile(6, 12, 14, 15))
    blind, unseen = [0, 1, 2, 3, *range(12, 40)], [0, 1, 2, 3, 12, 13, *range(15, 40)]
    key[:, :, unseen], value[:, :, unseen] = math.nan, math.inf
    out, lse = ENGINE.forward(query, key, value, tiles, Scores(1.0))
    assert (out[:, :, blind] == 0).all() and (lse[:, :, blind] == -math.inf).all()
    shares = ENGINE.backward(grad, query, key, value, out, lse, tiles, Scores(1.0))
    assert (shares[0][:, :, blind] == 0).all() and all((share[:, :, unseen] == 0).all() for share in shares[1:])
    key[:, :, unseen], value[:, :, unseen] = 0.0, 0.0
    expected, expected_lse = dense(query, key, value, tiles, Scores(1.0))
    assert_close_relative(out, expected, rtol=FLOAT64)
    assert_close_relative(lse, expected_lse, rtol=FLOAT64)
    assert all(share.isfinite().all() for share in shares)


def test_two_tables_merge_into_one():
    """As a ring does it: keys in two steps, then backward of each with the final out and lse."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 24, 16, dtype=torch.float64) for _ in range(4))
    both, scores = ((full_tile(4, 24, 0, 9),), (Tile(0, 24, 9, 24, -24, -9),)), Scores(0.3, 4.0)
    out, lse = ENGINE.forward(query, key, value, both[0], scores)
    merge_(out, lse, *ENGINE.forward(query, key, value, both[1], scores))
    shares = [ENGINE.backward(grad, query, key, value, out, lse, tiles, scores) for tiles in both]
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected, expected_lse = dense(*leaves, both[0] + both[1], scores)
    exact = torch.autograd.grad(expected, leaves, grad)
    assert_close_relative(out, expected, rtol=FLOAT64)
    assert_close_relative(lse, expected_lse, rtol=FLOAT64)
    for name, first, second, whole in zip(("dq", "dk", "dv"), *shares, exact, strict=True):
        assert_close_relative(first + second, whole, name, FLOAT64)


def test_strides_and_layouts():
    """Head-major, token-major and sliced memory, and a gradient that is one number seen everywhere."""
    torch.manual_seed(0)
    query = torch.randn(1, 8, 2, 32, dtype=torch.float64)[..., :16].transpose(1, 2)
    key, value = (torch.randn(1, 1, 20, 16, dtype=torch.float64)[:, :, 4::2] for _ in range(2))
    grad = torch.ones((), dtype=torch.float64).expand(1, 2, 8, 16)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected, _ = dense(*leaves, (causal(0, 8),), Scores(0.5))
    out, lse = ENGINE.forward(query, key, value, (causal(0, 8),), Scores(0.5))
    assert_close_relative(out, expected, rtol=FLOAT64)
    shares = ENGINE.backward(grad, query, key, value, out, lse, (causal(0, 8),), Scores(0.5))
    for name, share, exact in zip(("dq", "dk", "dv"), shares, torch.autograd.grad(expected, leaves, grad), strict=True):
        assert_close_relative(share, exact, name, FLOAT64)


def test_shapes_that_do_not_fit():
    query, key = torch.zeros(1, 3, 4, 16), torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match=r"\(1, 3, 4, 16\), \(1, 2, 4, 16\).*don't fit"):
        ENGINE.forward(query, key, key, (causal(0, 4),), Scores(1.0))


def test_nothing_at_all():
    query, key = torch.zeros(1, 1, 0, 16), torch.zeros(1, 1, 4, 16)
    out, lse = ENGINE.forward(query, key, key, (), Scores(1.0))
    assert out.shape == query.shape and lse.shape == (1, 1, 0)
    assert all((share == 0).all() for share in ENGINE.backward(query, query, key, key, out, lse, (), Scores(1.0)))
