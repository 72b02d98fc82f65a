from __future__ import annotations

import os

import pytest
import torch

from lightning_longctx.cli.cores import share_cores


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that monkeypatch puts back what is set below
    try:
        for num_processes, expected in ((4, 2), (3, 2), (8, 1), (16, 1)):
            monkeypatch.delenv("OMP_NUM_THREADS")
            share_cores(num_processes)
            assert (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()) == (str(expected), expected)
        share_cores(1)  # set by now: it is left alone
        assert os.environ["OMP_NUM_THREADS"] == "1"
    finally:
        torch.set_num_threads(before)
