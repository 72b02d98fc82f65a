"""``bench memory``: where its search goes, what its options refuse, that the plain twin is one, and whole runs."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_longctx.cli.bench.gate import WrongResultError
from lightning_longctx.cli.bench.memory import MemoryBench
from lightning_longctx.cli.bench.memory.outcome import DDP, LONGCTX, Outcome, hand_over, receive
from lightning_longctx.cli.bench.memory.plain import PlainCausalLM, PlainDecoder
from lightning_longctx.cli.bench.memory.report import check, rows_of
from lightning_longctx.cli.bench.memory.samples import RandomTokens
from lightning_longctx.cli.bench.memory.search import Search, Trial
from lightning_longctx.cli.bench.rows import COLUMNS
from lightning_longctx.loss import token_cross_entropy
from lightning_longctx.models import Decoder, DecoderConfig
from tests.launches import launch_environment

MIB, GIB = 2**20, 2**30


def searched(grow, most_trials: int = 30, **options) -> tuple[int | None, list[int]]:
    """The longest length that a search finds, and all that it tries."""
    search, trials = Search(**{"budget": GIB, "start": 512, "multiple": 8} | options), []
    while (tokens := search.next_length(trials)) is not None:
        assert tokens not in [trial.tokens for trial in trials] and len(trials) < most_trials
        trials.append(Trial(tokens, int(grow(tokens))))
    longest = search.longest(trials)
    return longest and longest.tokens, [trial.tokens for trial in trials]


@pytest.mark.parametrize("fixed", [0, 100 * MIB, 1000 * MIB])
@pytest.mark.parametrize("slope", [2e3, 6e4, 5e5])
def test_the_longest_is_found_within_the_resolution(fixed, slope):
    longest, tried = searched(lambda tokens: fixed + slope * tokens)
    limit = (GIB - fixed) / slope
    if longest is None:
        assert limit < 8 and tried[-1] == 8
    else:
        assert longest <= limit <= max(1.05 * longest, longest + 8)
    assert all(tokens % 8 == 0 for tokens in tried)


def test_a_line_takes_two_trials_once_the_limit_is_near():
    longest, tried = searched(lambda tokens: 200 * MIB + 60_000 * tokens)
    assert tried[:5] == [512, 1024, 2048, 4096, 8192] and len(tried) == 7 and longest == tried[-2]


def test_no_trial_is_more_than_twice_as_long_as_what_fits():
    _, tried = searched(lambda tokens: 5 * tokens**2)
    fitting = [0.5 * tried[0]]
    for tokens in tried:
        assert tokens <= 2 * max(fitting)
        fitting += [tokens] * (5 * tokens**2 <= GIB)


@pytest.mark.parametrize("seed", range(30))
def test_noise_ends_the_search_all_the_same(seed):
    draw = random.Random(seed)
    grown: dict[int, float] = {}

    def grow(tokens: int) -> float:
        return grown.setdefault(tokens, 8e4 * tokens * draw.uniform(0.7, 1.3))

    longest, _ = searched(grow)
    assert longest is not None and grown[longest] <= GIB
    assert all(grown[tokens] > GIB for tokens in grown if tokens > longest)


def test_steps_and_jumps():
    assert searched(lambda tokens: 0 if tokens < 9000 else 10**12)[0] in range(8560, 9000)
    assert searched(lambda tokens: (tokens // 4096 + 1) * 300e6)[0] in range(11600, 12288)


def test_limits_of_the_search():
    assert searched(lambda tokens: 1, max_tokens=5003) == (5000, [512, 1024, 2048, 4096, 5000])
    assert searched(lambda tokens: 1, max_tokens=100) == (96, [96])
    assert searched(lambda tokens: 2 * GIB)[0] is None
    assert searched(lambda tokens: tokens * MIB, budget=100 * MIB, multiple=1)[0] in range(96, 101)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 1}, "tokens=1 must be at least 2"),
        ({"warmup": 0}, "warmup=0 must be at least 1"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"budget_gib": 0.0}, "budget_gib=0.0 must be positive and finite"),
        ({"budget_gib": float("nan")}, "budget_gib=nan must be positive"),
        ({"budget_gib": 1.0, "resolution": 1.0}, "resolution=1.0 must be above 0 and below 1"),
        ({"policies": []}, "must name at least one policy"),
        ({"policies": ["full", "full"]}, "none of them twice"),
        ({"resolution": 0.1}, "resolution=0.1: without budget_gib"),
        ({"max_tokens": 99}, "max_tokens=99: without budget_gib"),
        ({"budget_gib": 1.0, "policies": ["full"]}, "with budget_gib the recipe's own policy"),
        ({"budget_gib": 1.0, "repeats": 3}, "repeats=3: with budget_gib"),
        ({"csv": "/nowhere/at/all.csv"}, "csv=/nowhere/at/all.csv is no file in a folder that exists"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MemoryBench(**options)


def test_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(WrongResultError, match="without torchrun"):
        MemoryBench().run()


@pytest.mark.parametrize("tied", [False, True])
def test_the_plain_twin_has_the_loss_and_gradients_of_the_decoder(tied):
    config = DecoderConfig(vocab_size=31, width=32, num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=tied)
    decoder, twin = Decoder(config).double(), PlainCausalLM(config)
    twin.decoder = PlainDecoder(config).double()
    twin.decoder.load_state_dict(decoder.state_dict())
    ids = torch.randint(31, (2, 12))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    total, count = token_cross_entropy(decoder(ids), labels)
    (total / count).backward()
    loss = twin.training_step({"input_ids": ids, "labels": ids})
    loss.backward()
    torch.testing.assert_close(loss, total / count)
    for (name, ours), theirs in zip(decoder.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, msg=name)


@pytest.mark.parametrize("option", [{"qk_norm": True}, {"windows": (4,)}, {"softcap": 5.0}, {"dropout": 0.1}])
def test_the_plain_twin_refuses_what_it_does_without(option):
    with pytest.raises(ValueError, match=f"decoder.{next(iter(option))}=.* budget_gib"):
        PlainDecoder(DecoderConfig(**option))


def test_samples_have_the_length_of_the_moment_and_are_the_same_everywhere():
    mine, other = RandomTokens(100, 8), RandomTokens(100, 8)
    assert torch.equal(mine[3]["input_ids"], other[3]["input_ids"])
    assert not torch.equal(mine[3]["input_ids"], mine[4]["input_ids"])
    mine.tokens = 5
    assert mine[3]["labels"].shape == (5,)


def outcome(**changes) -> Outcome:
    kind = {"heads": 4, "kv_heads": 2, "width": 8, "dtype": "32-true", "mask": "causal", "layout": "zigzag"}
    return replace(Outcome("none", LONGCTX, 2, 100, (2.0, 1.0, 4.0), 7, 5, (10, 30), 6, kind), **changes)


def test_rows_compare_tokens_a_second():
    ddp = outcome(system=DDP, tokens=25, seconds=(2.0,), sent=(0, 0))
    ours, theirs = rows_of([outcome(), ddp])
    assert (ours.seconds_median, ours.efficiency, ours.bytes_sent_mean, ours.peak_growth_bytes) == (2.0, 1.0, 20, 7)
    assert theirs.efficiency == pytest.approx(0.5) and theirs.bytes_sent_max == 0


def test_outcomes_arrive_as_they_were(tmp_path: Path):
    hand_over(tmp_path / "some.json", [outcome(), outcome(allocated=None)])
    assert receive(tmp_path / "some.json") == [outcome(), outcome(allocated=None)]


def test_selective_that_sends_or_attends_twice_does_not_count():
    check([outcome(), outcome(case="full", sent=(20, 60), rings=12), outcome(case="selective")])
    with pytest.raises(WrongResultError, match=r"sent in attention .* \(20, 60\) under selective, and \(10, 30\)"):
        check([outcome(), outcome(case="selective", sent=(20, 60))])
    with pytest.raises(WrongResultError, match="forward passes of attention in one step are 12 under selective"):
        check([outcome(), outcome(case="selective", rings=12)])


SMALL = """
trainer: {devices: 2}
model:
  class_path: lightning_longctx.CausalLM
  init_args:
    decoder: {vocab_size: 512, width: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, tie_embeddings: true}
"""


def bench(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, str]]]:
    (folder / "small.yaml").write_text(SMALL)
    recipes = ["--config", f"[memory_bench.yaml,{folder}/small.yaml]", "--csv", str(folder / "memory.csv")]
    command = [sys.executable, "-m", "lightning_longctx", "bench", "memory", *recipes, *options]
    done = subprocess.run(
        command, cwd=folder, env=launch_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "lightning_logs").exists(), "the bench leaves nothing behind"
    with (folder / "memory.csv").open(newline="") as file:
        return done, list(csv.DictReader(file))


@pytest.mark.slow
def test_policies_take_turns_in_a_run(tmp_path: Path):
    done, rows = bench(tmp_path, "--tokens", "256", "--repeats", "1")
    assert tuple(rows[0]) == COLUMNS
    assert [(row["case"], row["system"], row["tokens"]) for row in rows] == [
        (name, "longctx", "256") for name in ("none", "full", "selective")
    ]
    none, full, selective = rows
    assert 0 < int(none["bytes_sent_max"]) == int(selective["bytes_sent_max"]) < int(full["bytes_sent_max"])
    assert all(int(row["peak_growth_bytes"]) > 0 for row in rows)
    said = [line.split(":")[1].split(",")[0].strip() for line in done.stderr.splitlines() if line.startswith("step ")]
    assert said == ["none", "full", "selective"] * 2


@pytest.mark.exhaustive
def test_the_longest_sequence_is_compared_with_plain_lightning(tmp_path: Path):
    done, rows = bench(tmp_path, "--budget_gib", "4", "--tokens", "64", "--max_tokens", "200")
    assert [(row["case"], row["system"], row["tokens"]) for row in rows] == [
        ("selective", "longctx", "200"),
        ("none", "ddp", "200"),
    ]
    assert "ratio   1.0" in done.stdout and "200+" in done.stdout
    assert rows[1]["bytes_sent_max"] == "0" and int(rows[1]["peak_growth_bytes"]) > 0
    assert {row["layout"] for row in rows} == {"zigzag", "whole"}
