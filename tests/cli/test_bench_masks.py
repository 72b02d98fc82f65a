from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lightning_longctx.cli.bench.attention import AttentionBench, notes, scaled
from lightning_longctx.cli.bench.attention_case import AttentionCase, dense_mask
from lightning_longctx.cli.bench.attention_systems import attention_systems, schedule_of
from lightning_longctx.cli.bench.gate import errors, refuse_wrong
from lightning_longctx.cli.bench.masks import BenchMask, document_lengths, parse_mask
from lightning_longctx.cli.bench.measure import Measured
from lightning_longctx.cli.bench.single_process import SingleProcess
from lightning_longctx.plan.mask import Mask
from lightning_longctx.testing import dense_mask as oracle_mask

MASKS = ("causal", "full", "window:5", "window:2", "documents:16")


def case_of(mask: str, **sizes: object) -> AttentionCase:
    options = {"ranks": 1, "tokens": 96, "heads": 4, "kv_heads": 2, "width": 8, "dtype": "float32"}
    return AttentionCase(**options | sizes, mask=mask)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", MASKS)
def test_a_mask_is_read_and_written_alike(text: str) -> None:
    assert str(parse_mask(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("casual", "mask='casual' is unknown: use causal, full, window:W or documents:MEAN"),
        ("", "mask='' is unknown"),
        ("window", "mask='window' lacks its number of tokens.*window:1024"),
        ("documents", "lacks its number of tokens"),
        ("window:", "'' is no number of tokens"),
        ("window:wide", "'wide' is no number of tokens"),
        ("window:-3", "'-3' is no number of tokens"),
        ("window:1", "mask=window:1 makes no sense: window takes a number of tokens, at least 2"),
        ("documents:7", "documents takes a number of tokens, at least 8"),
        ("causal:3", "causal takes no number. Use mask=causal"),
    ],
)
def test_what_is_no_mask_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mask(text)
    with pytest.raises(ValueError, match=message):
        AttentionBench(mask=text)


def test_documents_are_those_that_other_figures_were_measured_with() -> None:
    """A sequence of draws that must never change, told by how many documents there are, and how long the longest is."""
    known = {(16384, 1024): (14, 3888), (16384, 256): (63, 968), (16384, 64): (256, 424), (4096, 1024): (4, 2480)}
    for (length, mean), (num, longest) in known.items():
        lengths = document_lengths(length, mean)
        assert (len(lengths), max(lengths), sum(lengths)) == (num, longest, length)
        assert all(tokens % 8 == 0 for tokens in lengths)


def test_documents_fill_any_length() -> None:
    for length in (1, 7, 8, 139, 1000):
        lengths = document_lengths(length, 16)
        assert sum(lengths) == length and min(lengths) > 0
        assert all(tokens % 8 == 0 for tokens in lengths[:-1])
        assert parse_mask("documents:16").documents(length)[-1] == length


@pytest.mark.parametrize("text", [*MASKS, "window:500"])
def test_visible_pairs_are_those_of_the_dense_mask(text: str) -> None:
    mask = parse_mask(text)
    dense = dense_mask(mask, 96)
    lengths = [stop - start for start, stop in pairwise(mask.documents(96))] or None
    assert torch.equal(dense, oracle_mask(96, mask.mask.causal, mask.mask.window, lengths))
    assert dense.sum().item() == mask.visible_pairs(96)


def test_the_checked_size_still_has_a_mask_to_check() -> None:
    small = case_of("documents:1024", tokens=16384, ranks=2).small()
    assert small.tokens == 256 and len(small.documents) > 4
    small = case_of("window:4096", tokens=16384, ranks=2).small()
    assert small.visible == BenchMask("window", 32)
    assert case_of("window:9", tokens=16384, ranks=2).small().visible == BenchMask("window", 9)
    assert case_of("causal", tokens=16384).small().visible == BenchMask()
    tiny = case_of("documents:1024", tokens=64)
    assert tiny.small() == tiny


@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize("name", ["single", "longctx-1", "longctx"])
def test_systems_compute_the_formula(text: str, name: str) -> None:
    case = case_of(text)
    for system in attention_systems(case):
        if system.name == name:
            job = system.setup(case, 0)
            refuse_wrong(name, [errors(job, case)], case)
            assert dict(job.sent_bytes()) == {}


@pytest.mark.parametrize("text", ["full", "window:5", "documents:16"])
def test_the_gate_sees_a_wrong_mask(text: str) -> None:
    """A system that computes plain causal attention fails wherever the case asks for something else."""
    causal = SingleProcess().setup(case_of("causal"), 0)
    case = case_of(text)
    found = {name: value for name, value in errors(causal, case_of("causal")).items() if value < case.tolerance}
    assert found.keys() == {"out", "dq", "dk", "dv"}
    expected = case.expected()
    for name, actual in causal.finish(causal.run()).items():
        assert (actual - expected[name]).norm() / expected[name].norm() > 100 * case.tolerance


def test_single_is_charged_for_visible_work_only() -> None:
    window = case_of("window:5")
    assert SingleProcess().scale(window) == pytest.approx(window.visible.visible_pairs(96) / (96 * 97 / 2))
    for text in ("causal", "full", "documents:16"):
        assert SingleProcess().scale(case_of(text)) == 1
    measured = scaled(Measured((4.0, 6.0), (4.0, 3.0), ({},), None), 0.25)
    assert (measured.seconds, measured.spread, measured.core_share) == ((1.0, 1.5), 0.5, 0.7)


def test_windows_and_documents_also_run_alone_and_notes_say_how_that_compares() -> None:
    for text, names in (("causal", []), ("full", []), ("window:5", ["longctx-1"]), ("documents:16", ["longctx-1"])):
        assert [system.name for system in attention_systems(case_of(text))] == ["single", *names, "longctx"]
    measured = {
        name: Measured((seconds,), (seconds,), ({},), None)
        for name, seconds in (("single", 3.0), ("longctx-1", 4.0), ("longctx", 2.5))
    }
    told = "\n".join(notes(case_of("window:5", ranks=2), measured, {"other": "not installed"}, cores=2))
    assert "efficiency of 0.800" in told and "0.1009" in told and "other: not installed" in told
    assert "of the 5 documents" in "\n".join(notes(case_of("documents:16", ranks=2), {}, {}, cores=2))


def test_masks_reach_attention() -> None:
    assert parse_mask("window:7").mask == Mask(window=7)
    assert parse_mask("full").mask == Mask(causal=False)
    assert parse_mask("documents:64").mask == Mask()
    assert case_of("documents:16").documents[-1] == 96 and not case_of("window:5").documents


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        ({"ranks": 2}, "flat"),
        ({"ranks": 4, "inner_ring": 2, "schedule": "double_ring"}, "double"),
        ({"ranks": 4, "schedule": "direct"}, "direct"),
        ({"ranks": 4, "schedule": "all_gather"}, "all_gather"),
        ({"ranks": 8, "head": 2, "inner_ring": 2, "schedule": "double_ring"}, "double"),
    ],
)
def test_the_schedule_column_is_one_plain_word(options: dict[str, object], schedule: str) -> None:
    assert schedule_of(AttentionBench(**options).case()) == schedule  # type: ignore[arg-type]


def test_auto_layout_follows_the_mask() -> None:
    layouts = {mask: AttentionBench(mask=mask, ranks=8).case().layout for mask in ("causal", "window:64")}
    assert layouts == {"causal": "zigzag", "window:64": "contiguous"}
    assert AttentionBench(mask="documents:64").case().layout == "balanced"
    assert AttentionBench(layout="striped").case().layout == "striped"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 4, "head": 3}, "head=3 does not divide ranks=4. Use head=1 or 2 or 4."),
        ({"ranks": 4, "head": 2, "tokens": 1022}, "tokens=1022 must divide by ranks=4.*Use tokens=1020, or head=1."),
        ({"ranks": 4, "head": 4, "heads": 6, "kv_heads": 3}, "head=4 does not fit"),
        ({"ranks": 4, "head": 2, "inner_ring": 4}, "inner_ring=4 does not divide context=2"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionBench(**options)  # type: ignore[arg-type]
