"""One conformance suite for all backends, on tiles: values, gradients, and the traps of PyTorch's CPU op."""

import pytest
import torch

from lightning_longctx.attention.backends import BACKENDS, choose_backend
from lightning_longctx.plan.tiles import Tile
from lightning_longctx.testing.tolerances import assert_close_relative, tolerance

CPU = torch.device("cpu")


def dense(query, key, value, tile, scale):
    """Out, lse in float64 by definition, through autograd."""
    group = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = scale * query.double() @ key.transpose(-1, -2)
    offset = torch.arange(tile.num_keys) - torch.arange(tile.num_queries)[:, None]
    scores = scores.masked_fill((offset <= tile.lo) | (offset > tile.hi), float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


TILES = {
    "full": Tile(0, 9, 0, 6, -9, 5),
    "causal": Tile(0, 8, 0, 8, -8, 0),
    "window": Tile(0, 8, 0, 8, -3, 0),
    "full window": Tile(0, 5, 0, 7, -2, 6),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 32, 64, 80, 256])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("tile", list(TILES))
def test_tile(request, backend, tile, dtype, width, kv_heads):
    engine, tile = BACKENDS[backend], TILES[tile]
    if backend == "aten" and "window" in request.node.callspec.params["tile"]:
        with pytest.raises(ValueError, match="window"):
            engine.parts(tile, CPU, dtype)
        return
    torch.manual_seed(0)
    query = torch.randn(2, 4, tile.num_queries, width, dtype=dtype)
    key, value = (torch.randn(2, kv_heads, tile.num_keys, width, dtype=dtype) for _ in range(2))
    grad = torch.randn_like(query)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected, expected_lse = dense(*leaves, tile, 0.2)
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())

    out, lse = engine.forward(query, key, value, tile, 0.2)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close_relative(out, expected, "out", tolerance(dtype))
    assert_close_relative(lse, expected_lse, "lse", tolerance(dtype))
    grads = engine.backward(grad, query, key, value, out, lse, tile, 0.2)
    for name, actual, exact in zip(("dq", "dk", "dv"), grads, expected_grads, strict=True):
        assert actual.shape == exact.shape
        assert_close_relative(actual, exact, name, 1.5 * tolerance(dtype, grad=True))


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
