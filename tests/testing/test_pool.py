"""The pool persists, reports the failing rank, times out, restarts, and never outlives its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_longctx.testing import GlooPool, RankError, failures

Pools = Callable[[int], GlooPool]


def pid_and_sum(value: float) -> tuple[int, int, torch.Tensor]:
    tensor = torch.full((3,), value + dist.get_rank(), dtype=torch.float64)
    dist.all_reduce(tensor)
    return dist.get_rank(), os.getpid(), tensor


def rank_1_fails_while_rank_0_receives() -> None:
    if dist.get_rank() == 1:
        print("last words")
        raise KeyError("the reason of rank 1")
    dist.recv(torch.zeros(1), src=1)


def refuse() -> None:
    raise ValueError("inner_ring=3 does not divide context=4")


def rank_1_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.recv(torch.zeros(1), src=1)


def wait_for_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def disturb() -> None:
    os.environ["PL_GLOBAL_SEED"] = "3"
    del os.environ["WORLD_SIZE"]
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.chdir("/")


def surroundings() -> tuple[dict[str, str], str, torch.dtype, bool, bool, int, float]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "PL_GLOBAL_SEED")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    flags = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return environment, os.getcwd(), torch.get_default_dtype(), *flags, torch.get_num_threads(), torch.rand(1).item()


def leave_group() -> int:
    dist.barrier()
    dist.destroy_process_group()
    return os.getpid()


def poisoned() -> list[bool]:
    batches = DataLoader(range(4), batch_size=2, num_workers=1, collate_fn=lambda items: torch.empty(2).isnan().all())  # type: ignore[arg-type]
    return [bool(torch.empty(2).isnan().all()), *(bool(batch) for batch in batches)]


def test_results_come_by_rank_from_the_same_processes(gloo: Pools) -> None:
    pool = gloo(2)
    pool.run(pid_and_sum, 0.0)
    pids = pool.pids
    assert os.getpid() not in pids and len(set(pids)) == 2
    for value in (1.0, 5.0):
        results = pool.run(pid_and_sum, value)
        assert [rank for rank, _, _ in results] == [0, 1]
        assert [pid for _, pid, _ in results] == pids
        for _, _, tensor in results:
            assert torch.equal(tensor, torch.full((3,), 2 * value + 1, dtype=torch.float64))
    assert gloo(2) is pool


def test_failure_of_one_rank_while_its_peer_waits(gloo: Pools) -> None:
    pool = gloo(2)
    pool.run(pid_and_sum, 0.0)
    before = pool.pids
    with pytest.raises(RankError, match="rank 1 of 2 failed: KeyError: 'the reason of rank 1'") as caught:
        pool.run(rank_1_fails_while_rank_0_receives)
    assert caught.value.rank == 1 and list(caught.value.failures) == [1]
    message = str(caught.value)
    assert "in rank_1_fails_while_rank_0_receives" in message and "last words" in message
    assert "rank 0 did not answer" in message
    assert [rank for rank, _, _ in pool.run(pid_and_sum, 0.0)] == [0, 1]
    assert not set(before) & set(pool.pids)


def test_equal_refusals_keep_the_world(gloo: Pools) -> None:
    pool = gloo(2)
    pool.run(pid_and_sum, 0.0)
    before = pool.pids
    with pytest.raises(RankError, match="inner_ring=3 does not divide context=4") as caught:
        pool.run(refuse)
    assert list(caught.value.failures.values()) == ["ValueError: inner_ring=3 does not divide context=4"] * 2
    pool.run(pid_and_sum, 0.0)
    assert pool.pids == before


def test_death_of_a_rank_is_the_cause_not_its_peers_closed_connection(gloo: Pools) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed: its process ended with exit code 7") as caught:
        gloo(2).run(rank_1_dies)
    assert caught.value.rank == 1


def test_timeout_names_the_ranks_and_shows_where_they_are(gloo: Pools) -> None:
    pool = gloo(2)
    pool.run(pid_and_sum, 0.0)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="ranks 0, 1 of 2 did not answer within 0.5 s") as caught:
        pool.run(wait_for_rank_1, timeout=0.5)
    assert time.monotonic() - started < 20
    assert str(caught.value).count("in wait_for_rank_1") == 2
    assert len(pool.run(pid_and_sum, 0.0)) == 2


def test_surroundings_are_put_back(gloo: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pool = gloo(2)
    before = pool.run(surroundings)
    pool.run(disturb)
    after = pool.run(surroundings)
    assert after == before
    environment, directory, dtype, has_grad, is_deterministic, num_threads, _ = after[1]
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert environment == {**ranks, "MASTER_ADDR": "127.0.0.1"}
    assert (directory, dtype, has_grad, is_deterministic, num_threads) == (str(tmp_path), torch.float32, True, False, 1)


def test_world_without_its_process_group_is_replaced(gloo: Pools) -> None:
    pool = gloo(2)
    pids = pool.run(leave_group)
    assert not set(pids) & {pid for _, pid, _ in pool.run(pid_and_sum, 0.0)}


def test_world_with_too_many_open_files_is_replaced(gloo: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_HANDLES", 0)
    pids = [{pid for _, pid, _ in gloo(2).run(pid_and_sum, 0.0)} for _ in range(2)]
    assert not pids[0] & pids[1]


def test_ranks_and_their_loader_workers_are_poisoned(gloo: Pools) -> None:
    assert gloo(2).run(poisoned) == [[True] * 3] * 2


def test_what_cannot_travel_is_refused(gloo: Pools) -> None:
    with pytest.raises(ValueError, match="top level of an importable module"):
        gloo(2).run(lambda: None)
    with pytest.raises(ValueError, match="num_ranks=0"):
        GlooPool(0)


def test_function_of_a_module_that_no_search_path_leads_to(gloo: Pools, tmp_path: Path) -> None:
    (tmp_path / "stray_ranks.py").write_text("def twice(x):\n    return 2 * x\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import stray_ranks  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
    assert gloo(2).run(stray_ranks.twice, 4) == [8, 8]


ORPHANS = """
import sys, time
sys.path[:] = {path!r}
from lightning_longctx.testing import GlooPool
from tests.testing.test_pool import pid_and_sum, wait_for_rank_1
if __name__ == "__main__":
    pool = GlooPool(2)
    pool.run(pid_and_sum, 0.0)
    print(*pool.pids, flush=True)
    pool.run(wait_for_rank_1)
"""


def status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    try:
        return status(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_stopped_between_calls(gloo: Pools) -> None:
    """Threads of their process groups would wake for nothing, thousands of times a second, while other pools work."""
    pool = gloo(2)
    for _ in range(2):
        pool.run(pid_and_sum, 0.0)
        deadline = time.monotonic() + 20
        while {status(pid)[0] for pid in pool.pids} != {"T"} and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [status(pid)[0] for pid in pool.pids] == ["T", "T"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_do_not_outlive_a_killed_parent() -> None:
    command = [sys.executable, "-c", ORPHANS.format(path=sys.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2 and all(map(is_alive, pids))
            pids.append(int(status(pids[0])[1]))  # the process that forked them
        finally:
            parent.kill()
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
