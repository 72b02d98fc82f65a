"""All kernels compile for Hopper on a machine without a GPU: what the interpreter forgives, the compiler does not."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
tl = triton.language

from lightning_longctx.attention.backends import Dropout, Scores  # noqa: E402
from lightning_longctx.attention.backends.triton import Triton  # noqa: E402
from lightning_longctx.kernels.jit import jit  # noqa: E402
from lightning_longctx.kernels.merge import merge_  # noqa: E402
from tests.attention.conformance import causal  # noqa: E402
from tests.kernels.hopper import SHARED_BYTES, compile_only  # noqa: E402

pytestmark = pytest.mark.skipif(
    not isinstance(tl.sum, triton.JITFunction),
    reason="Triton was imported under TRITON_INTERPRET=1, after which it can't compile; unset it to run this",
)
ADDRESS = re.compile(r"tt\.addptr .* : (.*), (.*) loc")
ATTENTION = ("attention_forward", "attention_dq", "attention_dkdv")


@pytest.fixture
def made(monkeypatch, tmp_path):
    return compile_only(monkeypatch, tmp_path)


def launch(dtype, width, heads, kv_heads, softcap=None, dropout_p=0.0):
    """All three attention kernels; what they would compute is of no interest."""
    query = torch.zeros(1, 256, heads, width, dtype=dtype).transpose(1, 2)
    key = torch.zeros(1, 256, kv_heads, width, dtype=dtype).transpose(1, 2)
    dropout = None
    if dropout_p:
        dropout = Dropout(dropout_p, torch.zeros(1, heads, 256, 2).long(), torch.arange(256))
    scores, tiles = Scores(0.125, softcap, dropout), (causal(0, 256),)
    out, lse = Triton().forward(query, key, key, tiles, scores)
    Triton().backward(query, query, key, key, out, lse, tiles, scores)


def narrow_addresses(kernel):
    """Places in floating-point tensors that are computed in 32 bits."""
    found = ADDRESS.findall(kernel.asm["ttir"])
    assert found, "no address in sight: the notation has changed"
    wide = ("i64", "i64>")
    return [pair for pair in found if re.search(r"ptr<(bf16|f16|f32)>", pair[0]) and not pair[1].endswith(wide)]


def check(made, names):
    assert sorted(made) == sorted(names)
    for kernel in made.values():
        assert kernel.asm["cubin"] and kernel.metadata.shared <= SHARED_BYTES
        assert not narrow_addresses(kernel)


@pytest.mark.slow
def test_plain_attention(made):
    """One head: Triton compiles numbers that are 1 into the kernel."""
    launch(torch.bfloat16, 64, 1, 1)
    check(made, ATTENTION)
    assert all("wgmma" in kernel.asm["ptx"] for kernel in made.values()), "products belong on the tensor cores"
    assert all("cp.async" in kernel.asm["ptx"] for kernel in made.values()), "loads should overlap with products"


@pytest.mark.slow
def test_grouped_heads_with_softcap_and_dropout(made):
    launch(torch.bfloat16, 128, 4, 2, softcap=30.0, dropout_p=0.6)
    check(made, ATTENTION)
    assert all("wgmma" in kernel.asm["ptx"] for kernel in made.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 80, 256])
def test_other_widths_and_dtypes(made, width, dtype):
    launch(dtype, width, 4, 2)
    check(made, ATTENTION)


def test_merge(made):
    out, new_out = torch.zeros(1, 4, 256, 128), torch.zeros(1, 4, 256, 128, dtype=torch.bfloat16)
    merge_(out, torch.zeros(1, 4, 256), new_out, torch.zeros(1, 4, 256))
    check(made, ["merge_rows"])


@jit
def narrow_copy(source, target, stride, SIZE: tl.constexpr):
    """What a kernel must not do: a place in 32 bits."""
    index = tl.arange(0, SIZE)
    tl.store(target + index, tl.load(source + index * stride))


def test_a_narrow_address_is_found(made):
    narrow_copy[(1,)](torch.zeros(64), torch.zeros(16), 4, SIZE=16)
    assert len(narrow_addresses(made["narrow_copy"])) == 2
