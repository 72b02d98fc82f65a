"""One conformance suite for all backends, on tiles: values, gradients, and the traps of PyTorch's CPU op."""

import pytest
import torch

from lightning_longctx.attention.backends import BACKENDS, Scores, reference
from lightning_longctx.plan.tiles import Tile
from tests.attention.conformance import LONG_TABLES, TABLES, check_table


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 32, 64, 80, 256])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("table", list(TABLES))
def test_table(backend, table, dtype, width, kv_heads):
    check_table(BACKENDS[backend], TABLES[table], dtype, width, kv_heads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("table", list(LONG_TABLES))
def test_table_that_is_cut(backend, table, dtype):
    """Long enough for every cut that a backend makes for speed."""
    check_table(BACKENDS[backend], LONG_TABLES[table], dtype, 16, 2)


@pytest.mark.parametrize(("softcap", "dropout_p"), [(2.0, 0.0), (None, 0.4), (2.0, 0.4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("table", list(TABLES))
def test_softcap_and_dropout(table, dtype, softcap, dropout_p):
    check_table(BACKENDS["reference"], TABLES[table], dtype, 32, 2, softcap=softcap, dropout_p=dropout_p)


def test_reference_takes_queries_in_blocks(monkeypatch):
    """Blocks are so small here that every query is one, and scores are 1 row x 14 keys."""
    monkeypatch.setattr(reference, "_MOST_SCORES", 1)
    for table in TABLES.values():
        check_table(BACKENDS["reference"], table, torch.float64, 16, 2, softcap=3.0, dropout_p=0.2)


def test_reference_rows_without_keys_are_nothing():
    engine, tile = BACKENDS["reference"], Tile(0, 4, 0, 4, -4, -2)  # rows 0 and 1 see nothing
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(4))
    out, lse = engine.forward(query, key, value, (tile,), Scores(1.0))
    assert (out[:, :, :2] == 0).all() and (lse[:, :, :2] == float("-inf")).all() and lse[:, :, 2:].isfinite().all()
    dquery, dkey, dvalue = engine.backward(grad, query, key, value, out, lse, (tile,), Scores(1.0))
    assert (dquery[:, :, :2] == 0).all()
    assert all(tensor.isfinite().all() for tensor in (dquery, dkey, dvalue))


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit", [-20000.0, -65000.0])
def test_a_very_low_logit_still_beats_the_mask(backend, dtype, logit):
    """B41: with a finite number for masked logits, the masked second key (value 100) would win."""
    query, key = torch.tensor([[[[logit], [0.0]]]]).to(dtype), torch.tensor([[[[1.0], [0.0]]]]).to(dtype)
    value = torch.tensor([[[[1.0], [100.0]]]]).to(dtype)
    engine, tile = BACKENDS[backend], Tile(0, 2, 0, 2, -2, 0)
    out, lse = engine.forward(query, key, value, (tile,), Scores(1.0))
    assert out[0, 0, 0, 0] == 1.0
    grad = torch.tensor([[[[1.0], [0.0]]]]).to(dtype)
    assert engine.backward(grad, query, key, value, out, lse, (tile,), Scores(1.0))[2].flatten().tolist() == [1.0, 0.0]
