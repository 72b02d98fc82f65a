from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_longctx.testing import cluster as emulated
from lightning_longctx.testing.cluster import Cluster, ClusterUnavailableError, why_unavailable
from lightning_longctx.testing.wiring import MAX_RANKS, Wiring

here = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "")

TALK = """
import os, sys, time, torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
near, far = rank ^ 1, (rank + size // 2) % size
block, arrived = torch.full((2_500_000 // 4,), float(rank)), torch.empty(2_500_000 // 4)
for peer, times in ((near, 5), (far, 1)):
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        work = dist.irecv(arrived, peer)
        dist.isend(block, peer).wait()
        work.wait()
        assert (arrived == peer).all()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    print(min(seconds))
sys.stdout.flush()
os._exit(0)
"""


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line}


def talk(cluster: Cluster) -> list[list[float]]:
    """For each rank, seconds to swap 2.5 MB with a rank of its node, and with one of another node.

    A swap over memory waits for cores that other work may have: the best of five tells what the link can do.
    """
    processes = [
        subprocess.Popen(
            [*place.prefix, sys.executable, "-c", TALK],
            env={**os.environ, **place.environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in cluster.places
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [[float(line) for line in text.splitlines()] for text in printed]


@here
@pytest.mark.parametrize("shared_nic", [False, True])
def test_links_inside_a_node_are_fast_and_others_have_the_rate(shared_nic: bool) -> None:
    with Cluster(2, 2, nic_mbit=100, shared_nic=shared_nic) as cluster:
        seconds = talk(cluster)
    # 2.5 MB at 100 Mbit/s are 0.2 s, less what a full bucket lets through at once (0.13 of 2.5 MB); twice on one card.
    least = 0.18 * (2 if shared_nic else 1)
    for near, far in seconds:
        assert far > least, seconds
        assert near < far / 2, seconds


@here
def test_each_cluster_removes_its_own_namespaces_and_no_others() -> None:
    before = namespaces()
    with Cluster(2, 1, nic_mbit=10) as first:
        with Cluster(1, 2, nic_mbit=10) as second:
            assert namespaces() - before >= {*first.wiring.namespaces, *second.wiring.namespaces}
        assert namespaces() >= set(first.wiring.namespaces)
        assert not namespaces() & set(second.wiring.namespaces)
    assert not namespaces() & set(first.wiring.namespaces)


@here
def test_a_half_made_cluster_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Wiring.commands
    monkeypatch.setattr(Wiring, "commands", lambda self: [*made(self)[:7], ("ip", "link", "add", "what")])
    cluster = Cluster(2, 2, nic_mbit=10)
    with pytest.raises(ClusterUnavailableError, match="`ip link add what` says"), cluster:
        pytest.fail("it was made")
    assert not namespaces() & set(cluster.wiring.namespaces)


def test_a_machine_without_root_says_so_before_it_makes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail(f"ran {args}"))
    with pytest.raises(ClusterUnavailableError, match="needs root"), Cluster(2, 1, nic_mbit=10):
        pytest.fail("it was made")


@pytest.mark.parametrize(
    ("platform", "programs", "message"), [("darwin", "", "darwin has not"), ("linux", "", "iproute2")]
)
def test_other_reasons_are_in_words(
    platform: str, programs: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path / programs))
    emulated.why_unavailable.cache_clear()
    reason = why_unavailable()
    emulated.why_unavailable.cache_clear()
    assert reason is not None and message in reason


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2, 100), "num_nodes=0 must be positive"),
        ((2, 0, 100), "ranks_per_node=0 must be positive"),
        ((2, 2, 0), "nic_mbit=0 must be positive"),
        ((5, 4, 100), f"20 processes on one machine: use at most {MAX_RANKS}"),
    ],
)
def test_sizes_that_make_no_cluster_are_refused(sizes: tuple[int, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(*sizes)


def test_a_rank_knows_its_place() -> None:
    cluster = Cluster(2, 4, nic_mbit=100)
    assert [place.prefix[-1] for place in cluster.places] == list(cluster.wiring.namespaces[1:])
    place = cluster.places[6].environment
    assert [place[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")] == ["6", "8", "2", "1"]
    assert (place["MASTER_ADDR"], place["GLOO_SOCKET_IFNAME"]) == ("10.77.0.1", "nic0")
    assert cluster.wiring.tag != Cluster(2, 4, nic_mbit=100).wiring.tag


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(1, 4), (2, 4), (4, 2), (8, 2)])
@pytest.mark.parametrize("shared_nic", [False, True])
def test_routes_lead_to_each_rank_over_the_right_wire(num_nodes: int, ranks_per_node: int, shared_nic: bool) -> None:
    wiring = Wiring("tag", num_nodes, ranks_per_node, 50, shared_nic)
    commands = [" ".join(command) for command in wiring.commands()]
    routes = [re.fullmatch(r"ip -n tag-r(\d+) route add 10.77.0.(\d+)/32 dev (\w+) .*", line) for line in commands]
    found = {(int(route[1]), int(route[2]) - 1): route[3] for route in routes if route}
    pairs = [(a, b) for a in range(wiring.num_ranks) for b in range(wiring.num_ranks) if a != b]
    assert found == {(a, b): "intra0" if a // ranks_per_node == b // ranks_per_node else "nic0" for a, b in pairs}
    limited = [line.split()[6] for line in commands if " tbf rate 50000kbit " in line]
    ends = [f"n{rank}" for rank in range(wiring.num_ranks)] + ["nic0"] * wiring.num_ranks
    trunks = [f"{end}{node}" for node in range(num_nodes) for end in ("below", "above")]
    assert sorted(limited) == sorted(trunks if shared_nic else ends)
