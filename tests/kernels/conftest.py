"""Kernels under Triton's interpreter."""

import pytest


@pytest.fixture
def interpreter(monkeypatch):
    """On for one test: kernels read the switch when they are launched, whoever imported Triton before."""
    pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
