from __future__ import annotations

import re

import pytest
import torch

from lightning_longctx.attention.backends import choose_backend
from lightning_longctx.cli import main
from tests.attention.library_stand_ins import set_versions


def explain(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, list[str]]:
    """Lines of each part of what is printed, by the first word of its title."""
    main(["explain", *options])
    parts = capsys.readouterr().out.strip().split("\n\n")
    return {part.split()[0].rstrip(","): part.splitlines()[1:] for part in parts}


def stars(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("*")]


def test_each_table_marks_one_choice_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    parts = explain(capsys, "--tokens", "8192", "--ranks", "8", "--inner_ring", "4", "--kv_heads", "8")
    assert set(parts) == {"Layouts", "Schedules", "Backends", "Arrangements"}
    assert stars(parts["Layouts"]) == ["zigzag"]
    assert all(len(stars(lines)) == 1 for name, lines in parts.items() if name != "Backends")
    assert parts["Layouts"][-1].startswith("zigzag: ")
    assert parts["Schedules"][-1].startswith(stars(parts["Schedules"])[0] + ": ")


def test_documents_and_windows_change_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    packed = explain(capsys, "--documents", "256", "--ranks", "4", "--tokens", "16384")
    assert stars(packed["Layouts"]) == ["balanced"]
    window = explain(capsys, "--mask", "window:512", "--ranks", "4", "--tokens", "16384")
    assert stars(window["Layouts"]) == ["contiguous"]


def test_slow_links_change_the_arrangement(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ("--tokens", "4096", "--inner_ring", "2", "--heads", "8", "--width", "64", "--links.teraflops", "0.02")
    slow = explain(capsys, *cluster, "--links.outer_gbits", "0.1", "--dtype", "float32")
    assert "heads" in next(line for line in slow["Arrangements"] if line.startswith("*"))


def verdicts(lines: list[str]) -> dict[tuple[str, str], str]:
    """By device and backend; the chosen ones begin with a star."""
    rows = [(line.startswith("*"), line[1:].split(maxsplit=2)) for line in lines if line[1:3] == "  "][1:]
    return {(device, name): "*" * star + verdict for star, (device, name, verdict) in rows}


@pytest.mark.parametrize(
    ("options", "installed", "gpu", "cpu"),
    [
        ((), {}, "varlen", "aten"),
        ((), {"flash-attn": "2.8.3"}, "flash", "aten"),
        (("--mask", "window:64", "--width", "80"), {}, "varlen", "aten"),
        (("--softcap", "true"), {"flash-attn": "2.8.3"}, "flash", "reference"),
        (("--dtype", "float64"), {}, "reference", "aten"),
    ],
)
def test_backends_are_what_the_registry_takes(
    options: tuple[str, ...],
    installed: dict[str, str],
    gpu: str,
    cpu: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_versions(monkeypatch, installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choose_backend.cache_clear()
    lines = explain(capsys, "--tokens", "1024", "--ranks", "1", *options)["Backends"]
    found = verdicts(lines)
    chosen = [row for row, verdict in found.items() if verdict == "*what backend=auto takes"]
    assert chosen == [("cuda", gpu), ("cpu", cpu)] and len(stars(lines)) == 2
    assert {name for _, name in found} == {"flash", "varlen", "aten", "triton", "reference"} and len(found) == 10
    assert all(found.values()) and lines[-1].startswith("cuda: no GPU is here")


def test_backends_say_why_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_versions(monkeypatch, {})
    options = ("--tokens", "1024", "--ranks", "1", "--width", "100", "--softcap", "true", "--dropout", "true")
    found = verdicts(explain(capsys, *options)["Backends"])
    assert "not by position" in found["cuda", "flash"]
    assert found["cpu", "varlen"] == "runs on cuda, not on cpu"
    assert "softcap" in found["cpu", "aten"]
    assert found["cpu", "reference"] == "*what backend=auto takes"


def test_heads_that_do_not_fit_are_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    parts = explain(capsys, "--tokens", "1024", "--heads", "3")
    assert any("does not fit" in line for line in parts["Arrangements"])
    assert any(re.search(r"head=8 does not fit 3 query heads", line) for line in parts["Arrangements"])


def test_one_rank_has_no_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    parts = explain(capsys, "--tokens", "1024", "--ranks", "1")
    assert "Schedules" not in parts
    assert len(stars(parts["Arrangements"])) == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--inner_ring", "3"], "inner_ring=3 does not divide ranks=8"),
        (["--mask", "sideways"], "sideways"),
        (["--mask", "documents:64"], "documents=64"),
        (["--kv_heads", "5"], "kv_heads=5"),
        (["--tokens", "4"], "tokens=4"),
        (["--ranks", "0"], "ranks=0"),
        (["--links.outer_gbits", "-1"], "links.outer_gbits=-1"),
    ],
)
def test_a_wrong_option_ends_with_its_name(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *options])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "lightning-longctx explain --tokens 131072" in shown
    assert all(option in shown for option in ("--documents", "--links.outer_gbits", "--keep_kv"))
