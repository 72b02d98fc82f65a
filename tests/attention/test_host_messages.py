"""Messages through memory: order, waiting, and what happens when the other end is wrong, slow or gone."""

import os
import signal
import socket
import subprocess
import threading
import time
from datetime import timedelta

import pytest
import torch

from lightning_longctx.attention import peer_memory
from lightning_longctx.attention.host_messages import HostMessages, Link
from lightning_longctx.attention.peer_errors import PeerError

pytestmark = pytest.mark.skipif(not peer_memory.is_possible(), reason="needs process_vm_readv, which Linux has")


def ends(count=2, seconds=5.0):
    """Some ranks in this one process, which may read its own memory as well."""
    links = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one):
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            links[one][other], links[other][one] = Link(here, os.getpid()), Link(there, os.getpid())
    return [HostMessages(of_rank, timedelta(seconds=seconds)) for of_rank in links]


def test_each_channel_keeps_its_order():
    sender, receiver = ends()
    sent = {channel: [torch.full((3,), 10.0 * channel + number) for number in range(3)] for channel in (0, 4)}
    pending = [sender.send(1, channel, [sent[channel][number]]) for number in range(3) for channel in (4, 0)]
    got = {channel: [torch.zeros(3) for _ in range(3)] for channel in (0, 4)}
    arriving = [receiver.receive(0, channel, [buffer]) for channel in (0, 4) for buffer in got[channel]]
    for message in reversed(arriving):
        message.wait()
    for message in pending:
        message.wait()
        message.wait()
    assert all(torch.equal(a, b) for channel in (0, 4) for a, b in zip(sent[channel], got[channel], strict=True))


def test_keys_and_values_of_unlike_sizes_and_dtypes_are_one_message():
    sender, receiver = ends()
    pair, got = [torch.randn(7, 5), torch.arange(9)], [torch.zeros(7, 5), torch.zeros(9, dtype=torch.int64)]
    arriving = receiver.receive(0, 1, got)
    leaving = sender.send(1, 1, pair)
    arriving.wait()
    leaving.wait()
    assert torch.equal(pair[0], got[0]) and torch.equal(pair[1], got[1])


def test_an_empty_message_arrives():
    sender, receiver = ends()
    leaving, arriving = sender.send(1, 0, [torch.empty(0)]), receiver.receive(0, 0, [torch.empty(0)])
    arriving.wait()
    leaving.wait()


def test_ranks_that_all_wait_for_their_sends_go_on():
    """A ring in which everybody first waits until its own message is taken: taking is nobody's background work."""
    ranks = ends(3)
    got = [torch.zeros(4) for _ in ranks]

    def work(rank):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        leaving = ranks[rank].send(after, 0, [torch.full((4,), float(rank))])
        arriving = ranks[rank].receive(before, 0, [got[rank]])
        leaving.wait()
        arriving.wait()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tensor[0].item() for tensor in got] == [2.0, 0.0, 1.0]


def test_a_message_of_another_size_is_refused():
    sender, receiver = ends()
    sender.send(1, 0, [torch.zeros(4)])
    with pytest.raises(RuntimeError, match="rank 0 sent 16 bytes where 20 were expected"):
        receiver.receive(0, 0, [torch.zeros(5)]).wait()


def test_waiting_has_an_end():
    sender, receiver = ends(seconds=0.2)
    with pytest.raises(RuntimeError, match="timed out waiting 0.2 s for rank 0"):
        receiver.receive(0, 0, [torch.zeros(1)]).wait()
    with pytest.raises(RuntimeError, match="timed out waiting 0.2 s for rank 1"):
        sender.send(1, 0, [torch.zeros(1)]).wait()


def test_a_rank_that_has_ended_is_an_error_only_where_it_is_missed():
    first, second, third = ends(3)
    kept = torch.ones(2)
    first.send(1, 0, [kept])
    first.close()
    got = torch.zeros(2)
    second.receive(0, 0, [got]).wait()  # it was there before
    assert torch.equal(got, kept)
    with pytest.raises(
        RuntimeError, match="connection closed by peer: rank 0 has lost rank 0 on the inner ring of the context axis"
    ):
        second.receive(0, 0, [got]).wait()
    with pytest.raises(
        RuntimeError, match="connection closed by peer: rank 0 has lost rank 0 on the inner ring of the context axis"
    ):
        third.send(0, 0, [kept]).wait()
    leaving, arriving = second.send(2, 0, [kept]), third.receive(1, 0, [got.zero_()])
    arriving.wait()
    leaving.wait()
    assert torch.equal(got, kept)


def test_a_rank_that_was_killed_after_its_offer_is_lost():
    """Its notice is still in the socket, its memory is not."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender = HostMessages({1: Link(here, os.getpid())}, timedelta(seconds=5))
    receiver = HostMessages({0: Link(there, gone.pid)}, timedelta(seconds=5))
    sender.send(1, 0, [torch.ones(2)])
    with pytest.raises(PeerError, match="has lost rank 0 on the inner ring of the context axis") as lost:
        receiver.receive(0, 0, [torch.zeros(2)]).wait()
    assert lost.value.cause == "lost" and lost.value.peer == 0


def test_what_one_call_does_not_copy_the_next_does(monkeypatch):
    """The kernel copies 2 GiB at most, and may stop anywhere."""
    call, sizes = peer_memory._CALL, []

    def short(process, here, here_count, there, there_count, flags):
        for pieces in (here, there):
            pieces[0].size = min(pieces[0].size, 10)
        sizes.append(here[0].size)
        return call(process, here, 1, there, 1, flags)

    monkeypatch.setattr(peer_memory, "_CALL", short)
    source, into = [torch.arange(7), torch.randn(3)], [torch.zeros(7, dtype=torch.int64), torch.zeros(3)]
    peer_memory.read(os.getpid(), [x.data_ptr() for x in source], into)
    assert torch.equal(source[0], into[0]) and torch.equal(source[1], into[1])
    assert sizes == [10] * 5 + [6, 10, 2]


def test_a_refusal_says_whose_memory():
    with pytest.raises(OSError, match="cannot read the memory of process"):
        peer_memory.read(os.getpid(), [8], [torch.zeros(1)])


def test_a_sender_looks_without_waiting():
    sender, receiver = ends()
    leaving = sender.send(1, 0, [torch.ones(3)])
    assert not leaving.is_over(due=True)
    receiver.receive(0, 0, [torch.zeros(3)]).wait()
    assert leaving.is_over(due=False)


def test_more_notices_than_a_socket_holds():
    sender, receiver = ends()
    sent = [torch.full((1,), float(number)) for number in range(700)]
    leaving = [sender.send(1, 0, [tensor]) for tensor in sent]
    coming = [receiver.send(0, 0, [tensor]) for tensor in sent]
    got, ended = torch.zeros(2, 700, 1), []

    def take(end, peer, buffers, others):
        for message in [end.receive(peer, 0, [buffer]) for buffer in buffers] + others:
            message.wait()
        end.close()  # not before its last notice has left
        ended.append(peer)

    threads = [
        threading.Thread(target=take, args=(receiver, 0, got[0], coming)),
        threading.Thread(target=take, args=(sender, 1, got[1], leaving)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert sorted(ended) == [0, 1]
    assert torch.equal(got, torch.arange(700.0).reshape(1, 700, 1).expand(2, -1, -1))


def test_a_timeout_of_a_year():
    sender, receiver = ends(seconds=365 * 86400.0)
    timer = threading.Timer(0.2, lambda: sender.send(1, 0, [torch.ones(1)]))
    timer.start()
    got = torch.zeros(1)
    receiver.receive(0, 0, [got]).wait()
    assert got.item() == 1.0


def test_a_forked_child_does_not_hide_the_end_of_its_parent():
    first, second = ends()
    child = os.fork()
    if child == 0:
        time.sleep(30.0)
        os._exit(0)
    try:
        first.close()
        with pytest.raises(
            RuntimeError,
            match="connection closed by peer: rank 0 has lost rank 0 on the inner ring of the context axis",
        ):
            second.receive(0, 0, [torch.zeros(1)]).wait()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
