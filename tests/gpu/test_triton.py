"""Our Triton kernels on a real GPU: the checks of the interpreter at real sizes, and what only a GPU can show."""

import math

import pytest
import torch

from lightning_longctx.attention.backends import Dropout, Needs, Scores
from lightning_longctx.attention.backends.dropping import keeps
from lightning_longctx.attention.backends.triton import Triton
from lightning_longctx.attention.merge import merge_ as torch_merge_
from lightning_longctx.plan.tiles import Tile, full_tile
from lightning_longctx.testing.tolerances import BFLOAT16, FLOAT32, assert_close_relative
from tests.attention.conformance import LONG_TABLES, TABLES, causal, check_table, dense

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CUDA = torch.device("cuda")
ENGINE = Triton()
MANY_DOCUMENTS = tuple(causal(start, 3) for start in range(0, 900, 3)) + (causal(900, 1124),)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("table", list(TABLES | LONG_TABLES))
def test_tables(table, width, dtype):
    tiles = (TABLES | LONG_TABLES)[table]
    check_table(ENGINE, tiles, dtype, width, 2, device=CUDA, softcap=4.0, dropout_p=0.2)
    check_table(ENGINE, tiles, dtype, width, 1, device=CUDA)


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_many_documents(kv_heads):
    check_table(ENGINE, MANY_DOCUMENTS, torch.bfloat16, 128, kv_heads, device=CUDA, heads=8)


def test_the_dropout_mask_bit_for_bit():
    torch.manual_seed(0)
    query, key = (torch.randn(2, 4, 256, 256, device=CUDA) for _ in range(2))
    value = torch.eye(256, device=CUDA).expand(2, 4, 256, 256)
    words, positions = torch.randint(2**32, (2, 4, 256, 2), device=CUDA), torch.randint(2**32, (256,), device=CUDA)
    for p in (0.1, 0.7):
        scores, tiles = Scores(0.02, dropout=Dropout(p, words, positions)), (full_tile(0, 256, 0, 256),)
        out, lse = ENGINE.forward(query, key, value, tiles, scores)
        assert torch.equal(out != 0, keeps(scores.dropout))
        dvalue = ENGINE.backward(value, query, key, value, out, lse, tiles, scores)[2]
        assert torch.equal(dvalue.transpose(2, 3) != 0, keeps(scores.dropout))


def test_rows_without_keys_and_memory_that_holds_anything():
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 700, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(4))
    tiles = (Tile(100, 300, 50, 250, -60, 0), full_tile(310, 320, 600, 601))
    unseen, blind = torch.ones(700, dtype=torch.bool), torch.ones(700, dtype=torch.bool)
    unseen[50:250] = unseen[600:601] = blind[100:300] = blind[310:320] = False
    key[:, :, unseen], value[:, :, unseen] = math.nan, math.nan
    out, lse = ENGINE.forward(query, key, value, tiles, Scores(0.125))
    dquery, dkey, dvalue = ENGINE.backward(grad, query, key, value, out, lse, tiles, Scores(0.125))
    assert (out[:, :, blind] == 0).all() and (lse[:, :, blind] == -math.inf).all() and (dquery[:, :, blind] == 0).all()
    assert (dkey[:, :, unseen] == 0).all() and (dvalue[:, :, unseen] == 0).all()
    assert all(tensor.isfinite().all() for tensor in (out, dquery, dkey, dvalue))


def test_the_same_bits_every_time():
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 8, 4096, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(4))
    tiles = (causal(0, 1000), causal(1000, 3096))

    def once():
        out, lse = ENGINE.forward(query, key, value, tiles, Scores(0.1))
        return out, lse, *ENGINE.backward(grad, query, key, value, out, lse, tiles, Scores(0.1))

    assert all(torch.equal(first, second) for first, second in zip(once(), once(), strict=True))


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """A million tokens of 20 heads of 128, in documents of 1,000: the last ones against the formula."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GB of GPU memory")
    tokens, heads, width, size = 1_000_000, 20, 128, 1000
    query, key, value = (
        torch.randn(1, tokens, heads, width, device=CUDA, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    )
    assert query.numel() > 2**31
    tiles = tuple(causal(start, size) for start in range(0, tokens, size))
    out, lse = ENGINE.forward(query, key, value, tiles, Scores(0.1))
    shares = ENGINE.backward(out, query, key, value, out, lse, tiles, Scores(0.1))
    leaves = [tensor[:, :, -size:].double().requires_grad_() for tensor in (query, key, value)]
    expected, _ = dense(*leaves, (causal(0, size),), Scores(0.1))
    assert_close_relative(out[:, :, -size:], expected, "out", BFLOAT16)
    exact = torch.autograd.grad(expected, leaves, out[:, :, -size:].double())
    for name, share, right in zip(("dq", "dk", "dv"), shares, exact, strict=True):
        assert_close_relative(share[:, :, -size:], right, name, 4 * BFLOAT16)


@pytest.mark.parametrize("width", [64, 80, 256])
def test_merge(width):
    from lightning_longctx.kernels.merge import merge_

    torch.manual_seed(0)
    out, new_out = (torch.randn(2, 1000, 4, width, device=CUDA).transpose(1, 2) for _ in range(2))
    lse, new_lse = (5 * torch.randn(2, 4, 1000, device=CUDA) for _ in range(2))
    lse[:, :, :4], new_lse[:, :, 2:6] = -math.inf, -math.inf
    out[:, :, :4], new_out[:, :, 2:6] = 0.0, 0.0
    expected = [tensor.double() for tensor in (out, lse, new_out, new_lse)]
    torch_merge_(*expected)
    merge_(out, lse, new_out, new_lse)
    assert_close_relative(out, expected[0], "out", FLOAT32)
    assert_close_relative(lse, expected[1], "lse", FLOAT32)
    assert (out[:, :, 2:4] == 0).all() and (lse[:, :, 2:4] == -math.inf).all()


def test_accepts_this_gpu():
    assert ENGINE.refusal(Needs(CUDA, torch.bfloat16, 128, True, True, True)) is None
