"""Every backend on a real GPU: the conformance suite at real sizes, a ring, and a compiled graph.

``test_triton.py`` looks closer at our own kernels.
"""

import pytest
import torch

from lightning_longctx.attention import attend
from lightning_longctx.attention.backends import BACKENDS, Needs, choose_backend
from lightning_longctx.plan.mask import Mask
from lightning_longctx.plan.tiles import Tile, full_tile
from lightning_longctx.sequence.layout import LAYOUTS
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.testing.loopback import Mesh, attention_over_ranks
from lightning_longctx.testing.tolerances import assert_close_relative, tolerance
from tests.attention.conformance import LONG_TABLES, TABLES, causal, check_table, needs_of
from tests.attention.whole import dense, inputs, oracle

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

CUDA, BFLOAT16 = torch.device("cuda"), torch.bfloat16
REAL_TABLES = {
    "causal": (causal(0, 4096),),
    "window": (Tile(0, 4096, 0, 4096, -1024, 0),),
    "documents": tuple(causal(start, 512 + start % 3) for start in range(0, 4096, 600)),
    "tiny documents": tuple(causal(start, 1 + start // 5 % 5) for start in range(0, 2048, 5)),
    "zigzag": (causal(0, 2048), causal(2048, 2048), full_tile(2048, 4096, 0, 2048)),
    "window over a shard's edge": (Tile(0, 2048, 0, 2048, 1024, 2047), Tile(0, 2048, 2048, 4096, -1024, 0)),
}


def able(backend, needs):
    """The backend, or a skip that says why not."""
    if reason := BACKENDS[backend].refusal(needs):
        pytest.skip(f"{backend}: {reason}")
    return BACKENDS[backend]


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("table", list(TABLES))
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_tables(backend, table, kv_heads, width, dtype):
    engine = able(backend, needs_of(CUDA, dtype, width, TABLES[table]))
    check_table(engine, TABLES[table], dtype, width, kv_heads, device=CUDA)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("table", list(LONG_TABLES | REAL_TABLES))
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_real_sizes(backend, table, width, softcap):
    tiles = (LONG_TABLES | REAL_TABLES)[table]
    engine = able(backend, needs_of(CUDA, BFLOAT16, width, tiles, softcap))
    check_table(engine, tiles, BFLOAT16, width, 2, device=CUDA, softcap=softcap)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
@pytest.mark.parametrize("table", list(REAL_TABLES))
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_dropout(backend, table, dropout_p):
    """The mask is a function of positions, so both have to draw that of the float64 formula."""
    tiles = REAL_TABLES[table]
    engine = able(backend, needs_of(CUDA, BFLOAT16, 64, tiles, dropout_p=dropout_p))
    check_table(engine, tiles, BFLOAT16, 64, 2, device=CUDA, dropout_p=dropout_p, batch=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_ring_on_one_gpu(backend, layout):
    """Four ranks in lockstep, against the formula over the whole sequence."""
    documents = (0, 200, 201, 700, 1024)
    for mask in (Mask(), Mask(window=100)):
        able(backend, Needs(CUDA, BFLOAT16, 64, mask.window is not None))
        tensors = inputs(1024, BFLOAT16, width=64)
        mesh = Mesh(layout, 4, 2, documents=documents)
        found = attention_over_ranks(*(tensor.to(CUDA) for tensor in tensors), mesh, mask=mask, backend=backend)
        expected = oracle(*tensors, dense(1024, mask, documents))
        for index, name in enumerate(("out", "dq", "dk", "dv")):
            allowed = tolerance(BFLOAT16, grad=index > 0)
            assert_close_relative(found[index].cpu(), expected[index], f"{mask} {name}", 2 * allowed)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attend_compiled_by_inductor(softcap):
    record = SequenceRecord(1024, documents=(0, 100, 1024))
    tensors = [tensor.to(CUDA) for tensor in inputs(1024, BFLOAT16, width=64)]

    def call(query, key, value):
        return attend(query * 1.5, key, value, sequence=record, window=100, softcap=softcap) * 2

    results = []
    for attention in (call, torch.compile(call, fullgraph=True)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        out = attention(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, tensors[3])))
    for found, expected in zip(results[1], results[0], strict=True):
        assert_close_relative(found, expected, rtol=tolerance(BFLOAT16, grad=True))


def test_what_auto_takes_here_runs():
    for window in (False, True):
        for softcap in (None, 5.0):
            engine = choose_backend("auto", Needs(CUDA, BFLOAT16, 128, window, softcap is not None))
            tiles = REAL_TABLES["window" if window else "zigzag"]
            check_table(engine, tiles, BFLOAT16, 128, 2, device=CUDA, softcap=softcap)
