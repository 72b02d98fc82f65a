"""The triton backend where it is meant to work: steps of a ring, whose keys have holes that nobody asked for."""

import pytest
import torch

from lightning_longctx.plan.mask import Mask
from lightning_longctx.testing.loopback import Mesh, attention_over_ranks
from lightning_longctx.testing.tolerances import FLOAT64
from tests.attention.whole import check, dense, inputs, oracle, sinks_of


@pytest.mark.parametrize(
    ("mesh", "mask"),
    [
        (Mesh("zigzag", 2, 2), Mask()),
        (Mesh("striped", 2, 1), Mask(window=5)),
        (Mesh("document_zigzag", 2, 2, documents=(0, 1, 4, 20, 22)), Mask()),
    ],
)
def test_over_ranks(interpreter, mesh, mask):
    tensors, sinks = inputs(22, torch.float64, heads=2, kv_heads=1), sinks_of(2)
    result = attention_over_ranks(*tensors, mesh, mask=mask, sinks=sinks, backend="triton")
    check(result, oracle(*tensors, dense(22, mask, mesh.documents), sinks), FLOAT64, f"{mesh.layout} {mask}")
