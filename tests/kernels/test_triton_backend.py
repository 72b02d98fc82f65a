"""What the triton backend accepts and refuses, and the switch between interpreter and compiler."""

import sys

import pytest
import torch

from lightning_longctx.attention.backends import Needs, Scores
from lightning_longctx.attention.backends.triton import Triton
from tests.attention.conformance import causal

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 80, 256])
def test_accepts_on_cuda(dtype, width):
    assert Triton().refusal(Needs(CUDA, dtype, width, window=True, softcap=True, dropout=True)) is None


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs(torch.device("mps"), torch.bfloat16, 64), "not for device type mps"),
        (Needs(CUDA, torch.float64, 64), "no torch.float64 on cuda"),
        (Needs(CUDA, torch.int64, 64), "no torch.int64 on cuda"),
        (Needs(CUDA, torch.bfloat16, 257), "head width 257 is over 256"),
        (Needs(CPU, torch.float32, 64), "set TRITON_INTERPRET=1"),
    ],
)
def test_refuses(monkeypatch, needs, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert reason in Triton().refusal(needs)


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert Triton().refusal(Needs(CUDA, torch.bfloat16, 64)) == "triton is not installed: pip install triton"


def test_on_cpu_under_the_interpreter(interpreter):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert Triton().refusal(Needs(CPU, dtype, 64)) is None
    assert "no torch.int64 on cpu" in Triton().refusal(Needs(CPU, torch.int64, 64))


def test_no_launch_on_cpu_without_the_interpreter(monkeypatch):
    """The switch counts when a kernel is launched: it may have been on when a backend was chosen."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    query = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="not on cpu: set TRITON_INTERPRET=1"):
        Triton().forward(query, query, query, (causal(0, 4),), Scores(1.0))


def test_takes_any_band_whole():
    assert Triton().takes_tables
    tile = causal(0, 4)._replace(lo=-3, hi=2)
    assert Triton().parts(tile, CUDA, torch.bfloat16) == (tile,)
