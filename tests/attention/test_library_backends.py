"""The backends over libraries' CUDA kernels, with the kernels stood in for: packing, rounds, merging, refusals."""

import inspect

import pytest
import torch

from lightning_longctx.attention.backends import Needs
from lightning_longctx.attention.backends import packed as packing
from lightning_longctx.attention.backends.flash import Flash, FlashAttn2, FlashAttn4
from lightning_longctx.attention.backends.varlen import Varlen
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.layout import LAYOUTS
from lightning_longctx.testing import loopback
from lightning_longctx.testing.loopback import Mesh, attention_over_ranks
from lightning_longctx.testing.tolerances import FLOAT64
from tests.attention.conformance import LONG_TABLES, TABLES, check_table
from tests.attention.library_stand_ins import (
    install_flash_attn_2,
    install_flash_attn_4,
    set_versions,
    torch_varlen,
)
from tests.attention.whole import check, dense, inputs, oracle

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ENGINES = {"varlen": Varlen(), "flash 2": Flash((FlashAttn2(),)), "flash 4": Flash((FlashAttn4(),))}


@pytest.fixture
def calls(request, monkeypatch):
    """What the stand-in for ``engine`` was called with: (pass, window, sequences)."""
    found = []
    engine = request.getfixturevalue("engine")
    if engine == "varlen":
        with torch_varlen(found):
            yield found
        return
    (install_flash_attn_2 if engine == "flash 2" else install_flash_attn_4)(monkeypatch, found)
    yield found


everywhere = pytest.mark.parametrize("engine", list(ENGINES))


@everywhere
@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.float64, 4), (torch.float64, 1), (torch.bfloat16, 2)])
@pytest.mark.parametrize("table", list(TABLES))
def test_table(engine, table, dtype, kv_heads, calls):
    check_table(ENGINES[engine], TABLES[table], dtype, 32, kv_heads)
    assert calls


@everywhere
@pytest.mark.parametrize("width", [64, 80, 256])
def test_widths(engine, width, calls):
    check_table(ENGINES[engine], TABLES["windows in documents"], torch.float64, width, 2)


@everywhere
@pytest.mark.parametrize("table", list(LONG_TABLES))
def test_long_table(engine, table, calls):
    check_table(ENGINES[engine], LONG_TABLES[table], torch.float64, 8, 1, heads=1)


@pytest.mark.parametrize("engine", ["flash 2", "flash 4"])
@pytest.mark.parametrize("table", list(TABLES))
def test_softcap(engine, table, calls):
    check_table(ENGINES[engine], TABLES[table], torch.float64, 32, 2, softcap=2.0)


@pytest.mark.parametrize(
    ("engine", "layout"), [*(("varlen", layout) for layout in LAYOUTS), ("flash 2", "zigzag"), ("flash 4", "striped")]
)
def test_on_a_ring(engine, layout, calls, monkeypatch):
    """Tables as real plans make them: packed rows, uneven shards, windows that end in other shards."""
    monkeypatch.setattr(loopback, "choose_backend", lambda name, needs: ENGINES[engine])
    for documents, rows in (((), 1), ((0, 5, 6, 13, 29), 1), ((0, 29, 30, 31, 50, 58), 2)):
        for mask in (Mask(), Mask(window=6), Mask(causal=False)):
            tensors = inputs(29, torch.float64, batch=2)
            mesh = Mesh(layout, 3, 3, documents=documents, num_rows=rows)
            result = attention_over_ranks(*tensors, mesh, mask=mask)
            check(result, oracle(*tensors, dense(29, mask, documents, rows)), FLOAT64, f"{documents} {mask}")


@everywhere
def test_a_layer_of_packed_documents_is_one_call(engine, calls):
    """Two rows of four documents, a window in all of them: eight sequences a call."""
    tiles = tuple(packing_tile(start, size) for start, size in ((0, 7), (7, 9), (16, 3), (19, 12)))
    check_table(ENGINES[engine], tiles, torch.float64, 16, 2)
    assert calls == [("forward", (1, 0), 8), ("backward", (1, 0), 8)]


def packing_tile(start, size):
    tile = TABLES["window"][0]
    return tile._replace(q_start=start, q_stop=start + size, k_start=start, k_stop=start + size, lo=-2)


@everywhere
def test_token_major_memory_is_not_copied(engine, calls):
    """Inputs of one row that lie as projections leave them enter the kernel as views."""
    memory = torch.randn(1, 24, 3, 4, 16, dtype=torch.float64)
    query, key, value = memory.transpose(2, 3).unbind(3)
    rows = packing._token_rows(query.transpose(1, 2))
    assert rows.shape == (24, 4, 16) and rows.data_ptr() == query.data_ptr()
    taken = packing.Rows(5, 7, None).of(rows)
    assert taken.data_ptr() == query[:, 5:].data_ptr()


@everywhere
def test_an_empty_table_is_nothing(engine, calls):
    query, key = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 3, 16)
    scores = packing.Scores(1.0)
    out, lse = ENGINES[engine].forward(query, key, key, (), scores)
    assert (out == 0).all() and (lse == float("-inf")).all() and lse.shape == (2, 4, 5)
    grads = ENGINES[engine].backward(out, query, key, key, out, lse, (), scores)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]
    assert not calls and all((grad == 0).all() for grad in grads)


def test_lse_of_another_layout_is_an_error(monkeypatch):
    kernel = ENGINES["flash 2"]._libraries[0]
    monkeypatch.setattr(kernel, "forward", lambda q, k, v, *_: (q, torch.zeros(len(q), q.shape[1])), raising=False)
    with pytest.raises(ValueError, match=r"lse \(9, 4\) for 9 queries of 4 heads"):
        packing.packed_forward(kernel, *[torch.randn(1, 4, 9, 16)] * 3, (packing_tile(0, 9),), packing.Scores(1.0))


def test_pytorchs_signatures_are_those_we_call():
    from torch.nn.attention import varlen

    names = list(inspect.signature(varlen.varlen_attn).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"return_aux", "scale", "window_size"} <= set(names)
    schema = torch.ops.torch_attn._varlen_attn_backward.default._schema
    assert [argument.name for argument in schema.arguments] == (
        "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size".split()
    )


def needs(device=CUDA, dtype=torch.bfloat16, width=128, **options):
    return Needs(device, dtype, width, **options)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (needs(CPU), "runs on cuda, not on cpu"),
        (needs(dtype=torch.float32), "no torch.float32"),
        (needs(width=100), "width 100 is not a multiple of 8 up to 256"),
        (needs(width=264), "width 264"),
        (needs(dropout=True), "would change with the layout"),
    ],
)
def test_refusals_that_all_share(asked, reason, monkeypatch):
    set_versions(monkeypatch, {"flash-attn": "2.8.3"})
    assert reason in Varlen().refusal(asked) and reason in Flash().refusal(asked)


def test_varlen_refuses_softcap_and_takes_windows():
    assert "softcap" in Varlen().refusal(needs(softcap=True))
    assert Varlen().refusal(needs(window=True)) is None


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({}, "flash-attn is not installed: pip install 'flash-attn>=2.7,<3'"),
        ({}, "flash-attn-4 is not installed: pip install 'flash-attn-4>=4.0.0b36,<5'"),
        ({"flash-attn": "2.6.3"}, "flash-attn 2.6.3 is not from 2.7 on"),
        ({"flash-attn": "3.0.0"}, "below 3"),
        ({"flash-attn-4": "4.0.0b4"}, "flash-attn-4 4.0.0b4 is not from 4.0.0b36 on"),
    ],
)
def test_flash_says_what_to_install(versions, reason, monkeypatch):
    set_versions(monkeypatch, versions)
    assert reason in Flash().refusal(needs(softcap=True, window=True))


@pytest.mark.parametrize("versions", [{"flash-attn": "2.7.4.post1"}, {"flash-attn-4": "4.0.0"}])
def test_flash_takes_either_package(versions, monkeypatch):
    set_versions(monkeypatch, versions)
    assert Flash().refusal(needs(softcap=True, window=True)) is None


BOTH = {"flash-attn": "2.8.3", "flash-attn-4": "4.0.0b40"}


@pytest.mark.parametrize(
    ("gpu", "width", "softcap", "chosen"),
    [
        ((9, 0), 128, False, FlashAttn4),
        ((9, 0), 192, True, FlashAttn4),
        ((10, 0), 256, False, FlashAttn4),
        ((10, 0), 256, True, FlashAttn2),
        ((10, 0), 192, False, FlashAttn2),
        ((8, 0), 128, False, FlashAttn2),
        ((12, 0), 128, False, FlashAttn2),
        ((7, 5), 128, False, "compute capability 8.0"),
    ],
)
def test_the_gpu_decides_between_them(gpu, width, softcap, chosen, monkeypatch):
    set_versions(monkeypatch, BOTH)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    for loader in ("flash_attn_2", "flash_attn_4"):
        monkeypatch.setattr(f"lightning_longctx._upstream.{loader}", lambda: None)
    engine, asked = Flash(), needs(width=width, softcap=softcap)
    if isinstance(chosen, str):
        assert chosen in engine.refusal(asked) and chosen in Varlen().refusal(asked)
    else:
        assert engine.refusal(asked) is None
        found = next(library for library in engine._libraries if library.refusal(asked) is None)
        assert type(found) is chosen


def test_a_package_that_cannot_be_imported_is_refused(monkeypatch):
    """As flash-attn built for another PyTorch: an undefined symbol."""
    set_versions(monkeypatch, {"flash-attn": "2.8.3"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "flash-attn 2.8.3 cannot be imported" in Flash().refusal(needs())
