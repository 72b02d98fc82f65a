"""What CUDA's allocator is told, when, and what the user hears of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_longctx import LongContextStrategy
from lightning_longctx.memory import allocator
from lightning_longctx.memory.allocator import SETTING, VARIABLES, choose_allocator, prepare_allocator


def test_segments_expand_where_nobody_has_said_otherwise() -> None:
    chosen = choose_allocator({"PATH": "/bin"}, started=False)
    assert chosen.environment == {"PYTORCH_ALLOC_CONF": SETTING}
    assert f"PYTORCH_ALLOC_CONF={SETTING}" in chosen.report


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_stays(name: str, started: bool) -> None:
    chosen = choose_allocator({name: "max_split_size_mb:512"}, started)
    assert chosen.environment == {}
    assert f"{name}=max_split_size_mb:512" in chosen.report and f"{SETTING} there would" in chosen.report
    report = choose_allocator({name: "expandable_segments:False"}, started).report
    assert f"{name}=expandable_segments:False" in report and "would" not in report
    assert choose_allocator({name: ""}, started).environment == {}


def test_the_report_names_the_variable_that_counts() -> None:
    report = choose_allocator({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}, started=False).report
    assert "b:2" in report and "a:1" not in report


def test_pytorch_looks_there_in_that_order() -> None:
    """The order that the reports rely on, as the installed version has it."""
    code = "from lightning_longctx._upstream import allocator_settings; print(allocator_settings())"
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = others | {"PYTORCH_ALLOC_CONF": SETTING, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:100"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if done.stdout.strip() == "None":
        pytest.skip("this version of PyTorch does not say")
    assert done.stdout.strip() == environment["PYTORCH_CUDA_ALLOC_CONF"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)
    heard: list[str] = []
    monkeypatch.setattr(allocator, "rank_zero_info", heard.append)
    monkeypatch.setattr(allocator, "allocator_settings", lambda: os.environ.get("PYTORCH_ALLOC_CONF", ""))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return heard


def test_launched_processes_inherit_it(said: list[str]) -> None:
    prepare_allocator("cuda")
    assert os.environ["PYTORCH_ALLOC_CONF"] == SETTING and len(said) == 1


def test_too_late_is_said(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    prepare_allocator("cuda")
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert (
        f"CUDA had started before the Trainer was made. Memory may fragment: set PYTORCH_ALLOC_CONF={SETTING}"
        in said[0]
    )


def test_settings_that_were_read_before_are_too_late_as_well(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "allocator_settings", lambda: "")
    prepare_allocator("cuda")
    assert "PYTORCH_ALLOC_CONF" not in os.environ and "before the Trainer was made" in said[0]


def test_only_on_cuda_and_when_the_trainer_is_made(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Trainer(accelerator="cpu", devices=1, strategy=LongContextStrategy(), logger=False)
    assert said == [] and "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.setattr(LongContextStrategy, "root_device", torch.device("cuda", 0))
    Trainer(accelerator="cpu", devices=1, strategy=LongContextStrategy(), logger=False)
    assert len(said) == 1 and os.environ["PYTORCH_ALLOC_CONF"] == SETTING
