from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import spawn
from pathlib import Path

import pytest

from lightning_longctx.cli import main
from lightning_longctx.cli.bench.attention import AttentionBench
from lightning_longctx.cli.bench.flat_zigzag import FlatRing
from lightning_longctx.cli.bench.measure import Measured, measure
from lightning_longctx.cli.bench.ranks import Ranks
from lightning_longctx.cli.bench.ring import RingBench
from lightning_longctx.cli.bench.ring_arrangements import ROWS, choose_rows, degrees_of, emulated_links
from lightning_longctx.cli.bench.ring_report import busiest_nic, speedup
from lightning_longctx.cli.bench.ring_systems import Arrangement, FlatZigzag, by_link
from lightning_longctx.cli.bench.rows import COLUMNS
from lightning_longctx.cli.bench.single_process import SingleProcess
from lightning_longctx.plan.communication import Communication
from lightning_longctx.sequence.layout import layout_ranges
from lightning_longctx.testing.cluster import Cluster, ClusterUnavailableError, Place, why_unavailable
from lightning_longctx.topology.neighbours import group_of
from tests.cli.idler import Idler

here = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "")


def flat_bytes(ranks: int, tokens: int, heads: int, width: int, size: int) -> int:
    """What every rank of the flat ring sends: keys and values twice W - 1 hops, their wide gradients W hops."""
    shard = 2 * tokens // ranks * heads * width
    return 2 * (ranks - 1) * shard * size + ranks * shard * max(4, size)


@here
def test_ring_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ring.csv"
    sizes = {"nodes": 2, "ranks_per_node": 2, "tokens": 128, "heads": 4, "kv_heads": 2, "width": 16}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    main(["bench", "ring", *options, "--repeats", "1", "--systems", "double,flat,head_across,auto", "--csv", str(file)])
    printed = capsys.readouterr().out
    assert "2 nodes x 2 ranks, one network card a rank of 100 Mbit/s" in " ".join(printed.split())
    assert "auto chose context=" in printed

    rows = {row["system"]: row for row in csv.DictReader(file.open(newline=""))}
    assert tuple(rows["flat"]) == COLUMNS
    assert {name: row["schedule"] for name, row in rows.items()} == {
        "single": "",
        "flat": "flat",
        "double": "double",
        "head_across": "head_across",
        "auto": "auto",
    }
    assert {row["case"] for row in rows.values()} == {"ring"}
    assert {row["ranks"] for name, row in rows.items() if name != "single"} == {"4"}
    assert {row["seconds_single"] for row in rows.values()} == {rows["single"]["seconds_median"]}
    sent = flat_bytes(4, 128, heads=2, width=16, size=4)
    assert int(rows["flat"]["bytes_sent_max"]) == int(rows["flat"]["bytes_outer_max"]) == sent
    # A ring of rings sends a block once to another node, not once for each of the node's ranks.
    assert 0 < int(rows["double"]["bytes_outer_max"]) <= sent / 3


@here
def test_a_terminated_bench_removes_its_cluster(tmp_path: Path) -> None:
    def mine() -> list[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return re.findall(rf"longctx-{process.pid}-\S+", listed)

    command = [sys.executable, "-m", "lightning_longctx", "bench", "ring", "--ranks_per_node", "1", "--repeats", "999"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while len(mine()) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert mine() == []
    finally:
        process.kill()
        process.wait()


def test_a_machine_without_clusters_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Cluster) -> Cluster:
        raise ClusterUnavailableError("an emulated cluster needs root.")

    monkeypatch.setattr(Cluster, "__enter__", refuse)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "ring"])
    assert ended.value.code == 1
    assert "Nothing was timed: an emulated cluster needs root." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "1"], "nodes=1 has no links between nodes"),
        (["--nodes", "5"], "20 processes on one machine: use at most 16"),
        (["--ranks_per_node", "0"], "ranks_per_node=0 must be positive"),
        (["--nic_mbit", "0"], "nic_mbit=0.0 must be positive"),
        (["--tokens", "4100"], "Use a multiple of 16."),
        (["--heads", "6", "--kv_heads", "4"], "kv_heads=4 does not divide heads=6"),
        (["--systems", "flat,triple"], "names ['triple']"),
        (["--systems", "head_inside", "--heads", "6"], "head_inside needs head=4 does not fit 6 query heads"),
        (["--csv", "/no/such/folder/file.csv"], "csv=/no/such/folder/file.csv"),
        (["--repeats", "0"], "repeats=0 must be at least 1"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RingBench, "run", lambda self: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "ring", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_system_computes_attention_and_counts_what_it_sends_over_which_link(dtype: str) -> None:
    """Here all links are as fast; the gate in ``measure`` compares values and gradients."""
    bench = AttentionBench(ranks=4, inner_ring=2, tokens=128, heads=4, kv_heads=2, width=16, dtype=dtype)  # type: ignore[arg-type]
    rows = ROWS[1:-1] if dtype == "float32" else ("double",)
    ours = [Arrangement(row, degrees_of(row, 2, 2), Communication("double_ring"), 2) for row in rows]
    measured = measure((SingleProcess(), FlatZigzag(2), *ours), bench.case(), 4, repeats=1, warmup=1)
    sent = flat_bytes(4, 128, heads=2, width=16, size={"float32": 4, "bfloat16": 2}[dtype])
    assert measured["flat"].sent == tuple({"inner": sent} if rank % 2 == 0 else {"outer": sent} for rank in range(4))
    if dtype == "float32":
        # Forward and backward, to each of the others: a head of queries, keys (a copy), values (a copy) and output.
        exchanged = 2 * 4 * 32 * 16 * 4
        assert measured["head_all"].sent == ({"inner": exchanged, "outer": 2 * exchanged},) * 4
        assert all(0 < measured[row].bytes_outer_max < sent for row in rows)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_flat_ring_computes_each_visible_pair_once(size: int) -> None:
    tokens = 4 * size
    shards = layout_ranges("zigzag", tokens, size)
    positions = [[position for piece in shard for position in piece] for shard in shards]
    seen = []
    for rank in range(size):
        for step in range(size):
            rows, columns = FlatRing(rank, size, None, None).seen(step, 4)  # type: ignore[arg-type]
            queries, keys = positions[rank][rows], positions[(rank - step) % size][columns]
            pairs = [(query, key) for query in queries for key in keys]
            seen += [(query, key) for query, key in pairs if key <= query] if step == 0 else pairs
    assert sorted(seen) == [(query, key) for query in range(tokens) for key in range(query + 1)]


def test_ranks_start_at_their_places() -> None:
    places = [
        Place(("env", f"WHERE=node {rank}"), {"LONGCTX_RANK": str(rank), "OMP_NUM_THREADS": "1"}) for rank in range(2)
    ]
    before, python = dict(os.environ), spawn.get_executable()
    with Ranks(2, Idler, places) as ranks:
        assert dict(os.environ) == before and spawn.get_executable() == python
        found = ranks.call("variables", "WHERE", "LONGCTX_RANK")
        pids = [place[1] for place in ranks.call("where")]
    assert found == [["node 0", "0"], ["node 1", "1"]]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "heads", "kv_heads", "rows"),
    [
        (2, 4, 8, 8, ROWS),
        (2, 4, 8, 2, ROWS),
        (2, 1, 8, 8, ("flat", "double", "keep_kv", "head_all", "auto")),
        (2, 4, 6, 6, ("flat", "double", "keep_kv", "head_across", "auto")),
        (2, 2, 3, 1, ("flat", "double", "keep_kv", "auto")),
    ],
)
def test_what_runs_unless_systems_are_named(
    nodes: int, ranks_per_node: int, heads: int, kv_heads: int, rows: tuple[str, ...]
) -> None:
    assert choose_rows(None, nodes, ranks_per_node, heads, kv_heads) == rows
    assert choose_rows("double,flat", nodes, ranks_per_node, heads, kv_heads) == ("flat", "double")


def test_keep_kv_for_all_needs_no_row_of_its_own() -> None:
    names = [system.name for system in RingBench(keep_kv=True).compared()]
    assert "double" in names and "keep_kv" not in names
    ours = [system for system in RingBench(keep_kv=True).compared() if isinstance(system, Arrangement)]
    assert all(system.communication.keep_kv for system in ours)


def test_head_groups_and_rings_lie_where_the_names_say() -> None:
    assert group_of(degrees_of("head_inside", 2, 4), 5, "head") == (4, 5, 6, 7)
    assert group_of(degrees_of("head_across", 2, 4), 5, "head") == (1, 5)
    assert group_of(degrees_of("head_across", 2, 4), 5, "context_outer", "context_inner") == (4, 5, 6, 7)
    assert degrees_of("double", 2, 4).windows == 2


def test_exchanged_heads_count_where_they_travel() -> None:
    assert by_link({"head": 70, "inner": 1, "outer": 2}, tuple(range(8)), 3, 4) == {"inner": 31, "outer": 42}
    assert by_link({"head": 30}, (4, 5, 6, 7), 5, 4) == {"inner": 30}
    assert by_link({"head": 30}, (1, 5), 5, 4) == {"outer": 30}
    assert by_link({"inner": 5}, (5,), 5, 4) == {"inner": 5}


def test_the_busiest_card_carries_all_ranks_that_share_it() -> None:
    sent = ({"outer": 1}, {"outer": 5}, {"outer": 4}, {"outer": 3, "inner": 9})
    result = Measured((2.0,), (1.0,), sent, None)
    assert (busiest_nic(result, 1), busiest_nic(result, 2)) == (5, 7)


def test_speedup_is_over_flat() -> None:
    measured = {name: Measured((seconds,), (1.0,), ({},), None) for name, seconds in (("flat", 6.0), ("double", 1.5))}
    assert speedup("double", measured) == "4.00x"
    assert speedup("single", measured) == speedup("double", {"double": measured["double"]}) == "-"


def test_ranks_share_cores_and_cards() -> None:
    alone, crowded = emulated_links(100, 1, 2, cores=8), emulated_links(100, 4, 8, cores=2)
    assert (alone.outer_gbits, crowded.outer_gbits) == (0.1, 0.025)
    assert crowded.teraflops == alone.teraflops / 4


def test_rounded_messages_are_allowed_their_rounding() -> None:
    exact, rounded = RingBench().case(), RingBench(communication_dtype="bfloat16").case()
    assert exact.tolerance < 1e-4 < rounded.tolerance == RingBench(dtype="bfloat16").case().tolerance
