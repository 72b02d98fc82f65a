"""Which backend ``auto`` takes, as a table, and what the others say."""

from importlib.util import find_spec

import pytest
import torch

from lightning_longctx.attention.backends import BACKENDS, Needs, choose_backend
from lightning_longctx.attention.backends.registry import PREFERENCE, refusals
from tests.attention.library_stand_ins import set_versions

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT64, FLOAT32, BFLOAT16, FLOAT16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
FLASH_2, FLASH_4 = {"flash-attn": "2.8.3"}, {"flash-attn-4": "4.0.0b36"}
has_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")


@pytest.fixture(autouse=True)
def _another_machine(monkeypatch):
    """No GPU to ask, nothing installed, Triton compiles: until a test says otherwise."""
    set_versions(monkeypatch, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choose_backend.cache_clear()
    yield
    choose_backend.cache_clear()


def table():
    """``(needs, installed, choice)`` for every device, dtype, width, window, softcap and dropout."""
    for dtype in (FLOAT64, FLOAT32, BFLOAT16, FLOAT16):
        for width in (1, 20, 64, 128, 256, 512):
            for window in (False, True):
                plain = Needs(CPU, dtype, width, window)
                yield plain, {}, "aten"
                yield plain._replace(softcap=True), {}, "reference"
                yield plain._replace(dropout=True), {}, "reference"
    ours = "triton"
    for window in (False, True):
        for dtype in (BFLOAT16, FLOAT16):
            for width in (8, 64, 80, 128, 256):
                plain = Needs(CUDA, dtype, width, window)
                yield plain, {}, "varlen"
                yield plain, FLASH_2, "flash"
                yield plain, FLASH_4, "flash"
                yield plain._replace(softcap=True), {}, ours
                yield plain._replace(softcap=True), FLASH_2, "flash"
                yield plain._replace(dropout=True), FLASH_2, ours
                yield plain._replace(softcap=True, dropout=True), FLASH_4, ours
            for width in (1, 20):
                yield Needs(CUDA, dtype, width, window), FLASH_2, ours
            yield Needs(CUDA, dtype, 512, window), FLASH_2, "reference"
        for softcap, dropout in ((False, False), (True, False), (False, True)):
            yield Needs(CUDA, FLOAT32, 128, window, softcap, dropout), FLASH_2, ours
            yield Needs(CUDA, FLOAT64, 128, window, softcap, dropout), FLASH_2, "reference"


@has_triton
def test_auto_takes_what_the_table_says(monkeypatch):
    for needs, installed, choice in table():
        set_versions(monkeypatch, installed)
        choose_backend.cache_clear()
        assert choose_backend("auto", needs).name == choice, (needs, installed)


@has_triton
def test_what_auto_takes_is_the_first_that_does_not_refuse():
    for needs, _, _ in table():
        reasons = refusals(needs)
        assert list(reasons)[: len(PREFERENCE[needs.device.type])] == list(PREFERENCE[needs.device.type])
        assert set(reasons) == set(BACKENDS) and all(reason is None or reason for reason in reasons.values())
        assert choose_backend("auto", needs).name == next(name for name, reason in reasons.items() if reason is None)


def test_every_refusal_is_an_error_that_says_what_would_do():
    for needs, _, _ in table():
        for name, reason in refusals(needs).items():
            if reason is None:
                assert choose_backend(name, needs).name == name
            else:
                with pytest.raises(ValueError, match=f"backend={name} cannot compute") as refused:
                    choose_backend(name, needs)
                assert f"{name}: {reason}" in str(refused.value) and "Use backend=auto or " in str(refused.value)


@pytest.mark.parametrize(
    ("name", "needs", "message"),
    [
        ("aten", Needs(CUDA, FLOAT32, 64), "no torch.float32 on cuda.*Use backend=auto or .*reference"),
        ("aten", Needs(CUDA, BFLOAT16, 64, window=True), "no windows on cuda"),
        ("varlen", Needs(CUDA, BFLOAT16, 64, softcap=True), "with softcap: .*knows no softcap"),
        ("flash", Needs(CUDA, BFLOAT16, 64), "pip install 'flash-attn>=2.7,<3'"),
        ("flesh", Needs(CPU, FLOAT32, 64), "backend='flesh' is unknown; choose auto or one of"),
        ("auto", Needs(CPU, torch.int64, 64), "floating-point"),
    ],
)
def test_refusals_name_what_is_asked(name, needs, message):
    with pytest.raises(ValueError, match=message):
        choose_backend(name, needs)


def test_without_triton_its_place_is_taken_by_the_formula(monkeypatch):
    from lightning_longctx.attention.backends import triton

    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    needs = Needs(CUDA, BFLOAT16, 128, dropout=True)
    assert choose_backend("auto", needs).name == "reference"
    assert "pip install triton" in str(refusals(needs)["triton"])
