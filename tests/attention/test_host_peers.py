"""Real processes of one machine, or of nodes that share one: who finds whom, and how they go on together."""

import os
import signal
import tempfile
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_longctx.attention import attend, peer_memory
from lightning_longctx.attention.host_messages import HostMessages
from lightning_longctx.attention.host_peers import find_host_peers
from lightning_longctx.attention.rings import find_ring
from lightning_longctx.attention.traffic import Traffic
from lightning_longctx.plan.communication import Communication
from lightning_longctx.testing import RankError
from tests.attention.ring_calls import on_node, opened

pytestmark = pytest.mark.skipif(not peer_memory.is_possible(), reason="needs process_vm_readv, which Linux has")


def found_peers(nodes=1, blind=()):
    """Which ranks of the world each rank reaches through memory."""
    rank, world = dist.get_rank(), dist.get_world_size()
    read = peer_memory.read

    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    peer_memory.read = refused if rank in blind else read
    try:
        with on_node(rank * nodes // world):
            links, pairs = find_host_peers(rank, set(range(world)) - {rank}, timedelta(seconds=30))
    finally:
        peer_memory.read = read
    peers = sorted(links)
    assert peers == sorted(other for pair in pairs if rank in pair for other in pair - {rank})
    HostMessages(links, timedelta(seconds=30)).close()
    return peers


def test_ranks_of_one_machine_find_each_other(gloo):
    assert gloo(4).run(found_peers) == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_ranks_of_different_nodes_do_not(gloo):
    assert gloo(4).run(found_peers, 2) == [[1], [0], [3], [2]]
    assert gloo(4).run(found_peers, 4) == [[], [], [], []]


def test_a_rank_that_may_not_read_is_left_to_the_group(gloo):
    assert gloo(4).run(found_peers, 1, (2,)) == [[1, 3], [0, 3], [], [0, 1]]


def groups_of_a_ring(shared_memory, nodes, **degrees):
    with opened(degrees, Communication(shared_memory=shared_memory), length=16, nodes=nodes) as record:
        ring = find_ring(record.ring)
        return sorted(ring.transport._groups), ring.heads is not None and ring.heads._group is not None


@pytest.mark.parametrize(
    ("shared_memory", "nodes", "degrees", "groups"),
    [
        (True, 1, dict(context=2, head=2), ([], False)),
        (True, 2, dict(context=2, head=2), (["grad_home", "grad_inner", "kv_inner"], False)),
        (True, 2, dict(context=2, head=2, placement="context_first"), ([], True)),
        (True, 2, dict(context=4, inner_ring=2), (["grad_home", "kv_outer"], False)),
        (False, 1, dict(context=4, inner_ring=2), (["grad_home", "grad_inner", "kv_inner", "kv_outer"], False)),
        (False, 1, dict(context=2, head=2), (["grad_home", "grad_inner", "kv_inner"], True)),
    ],
)
def test_process_groups_are_made_where_memory_does_not_reach(gloo, shared_memory, nodes, degrees, groups):
    assert gloo(4).run(groups_of_a_ring, shared_memory, nodes, **degrees) == [groups] * 4


def attend_without_rank_1(degrees):
    """Rank 1 ends between forward and backward, as a process that runs out of memory does."""
    with opened(degrees, length=64) as record:
        query, key, value = (torch.randn(1, 2, record.num_local_tokens, 8, requires_grad=True) for _ in range(3))
        out = attend(query, key, value, sequence=record)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        out.sum().backward()


@pytest.mark.parametrize("degrees", [dict(context=2), dict(head=2)])
def test_a_killed_rank_ends_the_wait_of_the_others(gloo, degrees):
    with pytest.raises(RankError, match="rank 1 of 2 failed: its process was ended by SIGKILL") as caught:
        gloo(2).run(attend_without_rank_1, dict(data=1) | degrees)
    assert "connection closed by peer: rank 0 has lost rank 1" in caught.value.failures[0]


def found_peers_with_folder(folder):
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        return found_peers()
    finally:
        tempfile.tempdir = before


@pytest.mark.parametrize("folder", ["/tmp/" + "long" * 40, "/proc/no/such"])
def test_a_folder_in_which_no_socket_can_be_made(gloo, folder):
    """Unix sockets have paths of 107 bytes at most."""
    assert gloo(2).run(found_peers_with_folder, folder) == [[1], [0]]


# Backward of 8 ranks in one ring over two nodes: which rank computes in which order. Were a sender to wait for a rank
# that waits for gloo, this one would hang.
HALVES = (0, 6, 15, 21, 24, 28, 29, 41, 50, 55)
ORDER = "66655552220003233766776677433445555343434166007711600772332232110077122444334566655555"


def replayed(order, seconds):
    with opened(dict(context=8), Communication("double_ring", True), length=55, documents=HALVES, nodes=2) as record:
        turns = [number for number, rank in enumerate(order) if int(rank) == dist.get_rank()]
        query, key, value = (torch.randn(1, 1, record.num_local_tokens, 8, requires_grad=True) for _ in range(3))
        out = attend(query, key, value, sequence=record, causal=False)
        dist.barrier()
        start = time.time() + 0.5

        def pause():
            if turns:
                time.sleep(max(0.0, start + turns.pop(0) * seconds - time.time()))

        with patched_traffic(pause):
            out.sum().backward()
        return True


@contextmanager
def patched_traffic(pause):
    enter, settle = Traffic.enter, Traffic.settle

    def slow_enter(self, step):
        block = enter(self, step)
        pause()
        return block

    def slow_settle(self):
        settle(self)
        pause()

    Traffic.enter, Traffic.settle = slow_enter, slow_settle
    try:
        yield
    finally:
        Traffic.enter, Traffic.settle = enter, settle


def test_a_ring_half_in_memory_does_not_hang(gloo):
    assert gloo(8).run(replayed, ORDER, 0.08, timeout=40) == [True] * 8
