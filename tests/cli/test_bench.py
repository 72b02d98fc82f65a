from __future__ import annotations

import csv
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_longctx.cli import main
from lightning_longctx.cli.bench.attention import AttentionBench
from lightning_longctx.cli.bench.attention_case import AttentionCase
from lightning_longctx.cli.bench.attention_systems import sequence_record
from lightning_longctx.cli.bench.gate import WrongResultError, errors, refuse_wrong
from lightning_longctx.cli.bench.measure import Measured, measure, num_stages
from lightning_longctx.cli.bench.ranks import RankFailedError, Ranks
from lightning_longctx.cli.bench.report import doubts, duration, footnotes, size
from lightning_longctx.cli.bench.rows import COLUMNS, Row, efficiency, num_cores, write_csv
from lightning_longctx.cli.bench.single_process import SingleProcess
from lightning_longctx.cli.bench.systems import Job
from lightning_longctx.memory.resident import peak_growth
from lightning_longctx.plan import plan_attention
from lightning_longctx.plan.counts import sent_bytes
from tests.cli.idler import Idler

HEADER = (
    "case,system,ranks,tokens,heads,kv_heads,width,dtype,mask,layout,schedule,seconds_median,seconds_single,efficiency,"
    "bytes_sent_mean,bytes_sent_max,bytes_outer_max,peak_growth_bytes"
)
ROW = Row(
    *("attention", "longctx", 2, 64, 4, 2, 16, "float32", "causal", "zigzag", "flat", 1.5, 2.0, 0.75, 1.0, 2, 0), None
)


def case_of(**options: object) -> AttentionCase:
    sizes = {"ranks": 1, "tokens": 64, "heads": 2, "width": 8, "dtype": "float64"}
    return AttentionBench(**sizes | options).case()  # type: ignore[arg-type]


def planned_bytes(case: AttentionCase) -> list[Counter[str]]:
    token = 2 * case.kv_heads * case.width * 4
    inner = case.degrees.inner
    counts = []
    for rank in range(case.ranks):
        plan = plan_attention(sequence_record(case, rank), case.visible.mask, case.communication)
        hops = (*plan.forward.sent, *plan.backward.sent)
        counts.append(sent_bytes(hops, plan.ring.parcels, inner, key_bytes=token, gradient_bytes=token))
    return counts


@dataclass(frozen=True)
class HalfGradient(SingleProcess):
    """A system whose key gradients are wrong."""

    name: str = "half"

    def setup(self, case: AttentionCase, rank: int) -> Job:
        job = super().setup(case, rank)
        return replace(job, run=lambda: (found := job.run()) | {"dk": found["dk"] / 2})


@pytest.mark.parametrize(
    ("mask", "layout"), [("causal", "zigzag"), ("window:20", "contiguous"), ("documents:32", "balanced")]
)
def test_attention_end_to_end(mask: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.csv"
    sizes: dict[str, object] = {"ranks": 4, "inner_ring": 2, "tokens": 139, "heads": 4, "kv_heads": 2, "width": 16}
    sizes |= {"mask": mask, "layout": layout, "schedule": "double_ring"}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    main(["bench", "attention", *options, "--repeats", "2", "--csv", str(file)])
    printed = capsys.readouterr().out
    assert "single" in printed and "longctx" in printed and "139 tokens" in printed

    assert file.read_text().splitlines()[0] == HEADER
    single, *alone, longctx = csv.DictReader(file.open(newline=""))
    assert [row["system"] for row in alone] == ([] if mask == "causal" else ["longctx-1"])
    assert (single["system"], single["ranks"], single["layout"], single["schedule"]) == ("single", "1", "", "")
    assert (longctx["system"], longctx["ranks"], longctx["layout"]) == ("longctx", "4", layout)
    assert longctx["schedule"] == "double"
    for row in (single, *alone, longctx):
        assert {row["case"], row["dtype"], row["mask"]} == {"attention", "float32", mask}
        assert [row[name] for name in ("tokens", "heads", "kv_heads", "width")] == ["139", "4", "2", "16"]
        assert row["seconds_single"] == single["seconds_median"]
    assert float(single["efficiency"]) == 1.0
    expected = float(single["seconds_median"]) / min(4, num_cores()) / float(longctx["seconds_median"])
    assert float(longctx["efficiency"]) == pytest.approx(expected)

    planned = planned_bytes(case_of(**sizes))
    assert float(longctx["bytes_sent_mean"]) == pytest.approx(sum(c.total() for c in planned) / 4)
    assert int(longctx["bytes_sent_max"]) == max(c.total() for c in planned)
    assert int(longctx["bytes_outer_max"]) == max(c["outer"] for c in planned)
    assert mask == "documents:32" or max(c["outer"] for c in planned) > 0
    assert single["bytes_sent_max"] == single["bytes_outer_max"] == "0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "4", "--inner_ring", "3"], "inner_ring=3 does not divide"),
        (["--heads", "6", "--kv_heads", "4"], "kv_heads=4 does not divide heads=6. Use kv_heads=1 or 2 or 3 or 6."),
        (["--ranks", "4", "--tokens", "7"], "tokens=7 are too few for ranks=4: use 8 or more."),
        (["--repeats", "0"], "repeats=0 must be at least 1"),
        (["--backend", "fast"], "backend='fast' is unknown"),
        (["--csv", "/no/such/folder/file.csv"], "csv=/no/such/folder/file.csv"),
        (["--layout", "zig"], "layout"),
        (["--rank", "2"], "--rank"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttentionBench, "run", lambda self: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (False, False)),
        (["--peers"], (True, False)),
        (["--peers", "--keep_kv", "--ranks", "2"], (True, True)),
        (["--peers", "false", "--keep_kv=true"], (False, True)),
    ],
)
def test_a_switch_needs_no_value(
    words: list[str], expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(AttentionBench, "run", lambda self: seen.append((self.peers, self.keep_kv)))
    main(["bench", "attention", *words])
    assert seen == [expected]


def test_a_bench_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 2
    assert "attention" in capsys.readouterr().err


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Query heads. (type: int, default: 8)" in text
    assert "usage: lightning-longctx bench" in text


def test_what_computes_something_else_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    with pytest.raises(WrongResultError, match="half does not compute what it should .dk on rank 0 is off by 0.5"):
        measure((SingleProcess(), HalfGradient()), case_of(), 1, repeats=1, warmup=1, progress=seen.append)
    assert seen == ["starting 1 processes", "checking single", "checking half"]


def test_a_refusal_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(self: AttentionBench) -> None:
        refuse_wrong("longctx", [{"out": 0.0}, {"out": 1.0}], self.case())

    monkeypatch.setattr(AttentionBench, "run", refuse)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention"])
    assert ended.value.code == 1
    assert "out on rank 1 is off by 1" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_gate_lets_rounding_pass_and_nothing_else(dtype: str) -> None:
    case = case_of(dtype=dtype, heads=4, kv_heads=2)
    job = SingleProcess().setup(case, 0)
    found = errors(job, case)
    assert found.keys() == {"out", "dq", "dk", "dv"}
    refuse_wrong("single", [found], case)

    def shifted() -> dict[str, Tensor]:
        return {name: tensor * (1 + 3 * case.tolerance) for name, tensor in job.run().items()}

    def spoiled() -> dict[str, Tensor]:
        return job.run() | {"dq": torch.full((1, 4, 64, 8), float("nan"))}

    def shorter() -> dict[str, Tensor]:
        return {name: tensor[:, :, 1:] for name, tensor in job.run().items()}

    for run in (shifted, spoiled, shorter, lambda: {"out": job.run()["out"]}):
        with pytest.raises(WrongResultError):
            refuse_wrong("other", [errors(replace(job, run=run), case)], case)


def test_the_checked_size_is_as_uneven_as_the_timed_one() -> None:
    for tokens, ranks, checked in (
        (16384, 2, 256),
        (16387, 2, 259),
        (100, 2, 100),
        (100001, 64, 1057),
        (16384, 3, 256),
    ):
        case = case_of(tokens=tokens, ranks=ranks)
        assert case.small().tokens == checked
        assert (tokens - checked) % (2 * ranks) == 0 or checked == tokens


def test_ranks_have_one_thread_and_sleep_while_others_work() -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    with Ranks(2, Idler) as ranks:
        assert os.environ.get("OMP_NUM_THREADS") == before
        places = ranks.call("where")
        assert [(rank, threads, num) for rank, _, threads, num in places] == [(0, "1", 1), (1, "1", 1)]
        assert [place[0] for place in ranks.call("where", num_ranks=1)] == [0]
        start = ranks.call("core_seconds")
        ranks.call("pause", num_ranks=1)
        assert ranks.call("core_seconds")[1] - start[1] < 0.2
    for _, pid, _, _ in places:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("method", "message"), [("fail_on_rank_1", "ArithmeticError: one is wrong"), ("end_on_rank_1", "exit code -9")]
)
def test_a_rank_that_fails_ends_all(method: str, message: str) -> None:
    with pytest.raises(RankFailedError, match=message) as failed, Ranks(2, Idler) as ranks:
        places = ranks.call("where")
        ranks.call(method)
    assert "rank 1" in str(failed.value)
    for _, pid, _, _ in places:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_more_ranks_than_cores_share_the_cores() -> None:
    assert efficiency(seconds=1.0, seconds_single=2.0, ranks=2, cores=8) == 1.0
    assert efficiency(seconds=1.0, seconds_single=2.0, ranks=4, cores=8) == 0.5
    assert efficiency(seconds=1.0, seconds_single=2.0, ranks=4, cores=2) == 1.0
    assert "4 ranks)" in footnotes(4, 8, 5)
    assert "single / 2 (2 cores, which 4 ranks share)" in footnotes(4, 2, 5)


def test_csv_has_the_columns_of_every_bench_and_empty_cells_for_what_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("what was here before\n" * 9)
    write_csv(file, [ROW, replace(ROW, peak_growth_bytes=5)])
    assert ",".join(COLUMNS) == HEADER
    common = "attention,longctx,2,64,4,2,16,float32,causal,zigzag,flat,1.5,2.0,0.75,1.0,2,0,"
    assert file.read_text() == f"{HEADER}\n{common}\n{common}5\n"


def test_medians_and_worst_ranks() -> None:
    sent = ({"inner": 10, "outer": 1}, {"inner": 2, "outer": 3})
    result = Measured(seconds=(3.0, 1.0, 2.0), core_seconds=(1.0, 1.0, 1.0), sent=sent, peak_growth=None)
    assert (result.seconds_median, result.spread, result.core_share) == (2.0, 2.0, 0.5)
    assert (result.bytes_sent_mean, result.bytes_sent_max, result.bytes_outer_max) == (8.0, 11, 3)


def test_a_noisy_machine_is_admitted() -> None:
    def single(seconds: tuple[float, ...], core: float) -> dict[str, Measured]:
        return {"single": Measured(seconds, (core,) * len(seconds), ({},), None)}

    assert doubts(single((1.0, 1.01), 1.0)) == ""
    assert "other work took 50% of the core" in doubts(single((1.0, 1.0), 0.5))
    assert "the slowest run took 20% longer" in doubts(single((1.0, 1.2), 1.1))


def test_progress_is_announced_as_often_as_promised() -> None:
    seen: list[str] = []
    systems = (SingleProcess(), SingleProcess("again"))
    measured = measure(systems, case_of(tokens=32), 1, repeats=2, warmup=1, progress=seen.append)
    assert len(seen) == num_stages(systems, repeats=2, warmup=1)
    assert seen[-4:] == ["timing single", "timing again"] * 2
    assert all(len(each.seconds) == 2 and each.bytes_sent_max == 0 for each in measured.values())


def test_peak_growth_sees_memory_that_is_gone_again() -> None:
    growth = peak_growth(lambda: torch.ones(16 << 20).sum())
    if growth is None:
        pytest.skip("this system keeps no peak of the resident set that can be reset")
    assert 60 << 20 < growth < 90 << 20


def test_units() -> None:
    assert [duration(seconds) for seconds in (12.34, 0.01234)] == ["12.3 s", "12.3 ms"]
    assert [size(number) for number in (None, 0, 33_600_000)] == ["?", "-", "33.6 MB"]
