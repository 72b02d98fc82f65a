"""One conformance suite for all backends, on tiles: values, gradients, and the traps of PyTorch's CPU op."""

import pytest
import torch

from lightning_longctx.attention.backends import BACKENDS, choose_backend
from lightning_longctx.attention.merge import RunningSoftmax, wide_dtype
from lightning_longctx.attention.sums import TokenSum
from lightning_longctx.plan.stacks import Stack
from lightning_longctx.plan.tiles import Tile
from lightning_longctx.testing.oracle import attention_oracle
from lightning_longctx.testing.tolerances import assert_close_relative, tolerance

CPU = torch.device("cpu")


def dense(query, key, value, tile, scale):
    """Out and lse in float64 by definition, through autograd."""
    offset = torch.arange(tile.num_keys) - torch.arange(tile.num_queries)[:, None]
    return attention_oracle(query, key, value, (tile.lo < offset) & (offset <= tile.hi), scale)


def computed(engine, query, key, value, grad, tile, scale):
    """Out, lse, dq, dk, dv of a tile from what the backend makes of it."""
    running, sums = RunningSoftmax(query, value.shape[-1]), [TokenSum(tensor) for tensor in (query, key, value)]
    for part in engine.parts(tile, CPU, query.dtype):
        rows, columns = slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop)
        out, lse = engine.forward(query[:, :, rows], key[:, :, columns], value[:, :, columns], part, scale)
        assert out.dtype == query.dtype and lse.dtype == wide_dtype(query.dtype)
        running.add(Stack(part).queries, out, lse)
    out, lse = running.result()
    out = out.to(query.dtype)
    for part in engine.parts(tile, CPU, query.dtype, backward=True):
        rows, columns = slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop)
        tensors = [x[:, :, rows] for x in (grad, query)], [x[:, :, columns] for x in (key, value)]
        final = [x[:, :, rows] for x in (out, lse)]
        shares = engine.backward(*tensors[0], *tensors[1], *final, part, scale)
        spans = (Stack(part).queries, Stack(part).keys, Stack(part).keys)
        for total, share, span in zip(sums, shares, spans, strict=True):
            total.add(span, share)
    return out, lse, *(total.total() for total in sums)


def check_tile(backend, tile, dtype, width, kv_heads):
    torch.manual_seed(0)
    query = torch.randn(2, 4, tile.num_queries, width, dtype=dtype)
    key, value = (torch.randn(2, kv_heads, tile.num_keys, width, dtype=dtype) for _ in range(2))
    grad = torch.randn_like(query)
    leaves = [tensor.double().detach().requires_grad_() for tensor in (query, key, value)]
    expected, expected_lse = dense(*leaves, tile, 0.2)
    exact = (expected, expected_lse, *torch.autograd.grad(expected, leaves, grad.double()))
    found = computed(BACKENDS[backend], query, key, value, grad, tile, 0.2)
    for index, name in enumerate(("out", "lse", "dq", "dk", "dv")):
        allowed = tolerance(dtype) if index < 2 else 1.5 * tolerance(dtype, grad=True)
        assert_close_relative(found[index], exact[index], name, allowed)


TILES = {
    "full": Tile(0, 9, 0, 6, -9, 5),
    "causal": Tile(0, 8, 0, 8, -8, 0),
    "window": Tile(0, 8, 0, 8, -3, 0),
    "full window": Tile(0, 5, 0, 7, -2, 6),
    "rows and keys that meet nothing": Tile(0, 7, 0, 8, 4, 6),
}
LONG_TILES = {
    "causal": Tile(0, 700, 0, 700, -700, 0),
    "many keys": Tile(0, 20, 0, 2500, -20, 2499),
    "narrow window": Tile(0, 700, 0, 700, -60, 0),
    "wide window": Tile(0, 700, 0, 700, -400, 0),
    "end of a wide window": Tile(0, 600, 0, 600, 100, 599),
    "band off the diagonal": Tile(0, 600, 0, 900, 50, 350),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 32, 64, 80, 256])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("tile", list(TILES))
def test_tile(backend, tile, dtype, width, kv_heads):
    check_tile(backend, TILES[tile], dtype, width, kv_heads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("tile", list(LONG_TILES))
def test_tile_that_is_cut(backend, tile, dtype):
    """Long enough for every cut that a backend makes for speed."""
    check_tile(backend, LONG_TILES[tile], dtype, 16, 2)


def test_reference_rows_without_keys_are_nothing():
    engine, tile = BACKENDS["reference"], Tile(0, 4, 0, 4, -4, -2)  # rows 0 and 1 see nothing
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(4))
    out, lse = engine.forward(query, key, value, tile, 1.0)
    assert (out[:, :, :2] == 0).all() and (lse[:, :, :2] == float("-inf")).all() and lse[:, :, 2:].isfinite().all()
    dquery, dkey, dvalue = engine.backward(grad, query, key, value, out, lse, tile, 1.0)
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
    out, lse = engine.forward(query, key, value, tile, 1.0)
    assert out[0, 0, 0, 0] == 1.0
    grad = torch.tensor([[[[1.0], [0.0]]]]).to(dtype)
    assert engine.backward(grad, query, key, value, out, lse, tile, 1.0)[2].flatten().tolist() == [1.0, 0.0]


def test_registry_explains():
    assert choose_backend("auto", CPU, torch.float32, 64).name == "aten"
    assert choose_backend("reference", CPU, torch.bfloat16, 64).name == "reference"
    cuda = torch.device("cuda")
    assert choose_backend("auto", cuda, torch.bfloat16, 128).name == "aten"
    assert choose_backend("auto", cuda, torch.float32, 128).name == "reference"
    assert choose_backend("auto", cuda, torch.bfloat16, 512).name == "reference"
    with pytest.raises(ValueError, match="backend=aten cannot compute.*no torch.float32 on cuda.*reference"):
        choose_backend("aten", cuda, torch.float32, 64)
    with pytest.raises(ValueError, match="backend='flesh' is unknown"):
        choose_backend("flesh", CPU, torch.float32, 64)
    with pytest.raises(ValueError, match="floating-point"):
        choose_backend("auto", CPU, torch.int64, 64)
