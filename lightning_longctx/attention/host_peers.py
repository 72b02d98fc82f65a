"""Which ranks run on one machine and may read each other's memory: they find and connect to each other."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_longctx.attention import peer_memory
from lightning_longctx.attention.host_messages import Link

Pairs = frozenset[frozenset[int]]
"""Of global ranks."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK")
_SECRET_BYTES = 16
_MOST_RANKS = 1024  # on one machine


class _Card(NamedTuple):
    """What a rank tells about itself."""

    machine: str
    process: int
    socket_path: str
    """Empty if it cannot be reached."""
    secret: bytes
    address: int
    """Where the secret lies in its memory."""


def find_host_peers(rank: int, partners: Collection[int], timeout: timedelta) -> tuple[dict[int, Link], Pairs]:
    """Connect to the partners that can read this process' memory and be read by it; a collective over the world.

    A pair that cannot goes on over process groups: on two machines or nodes, in two containers, or where the system
    restricts ptrace (as kernel.yama.ptrace_scope does).

    Args:
        rank: This process' global rank.
        partners: Global ranks that it exchanges messages with, and they with it.
        timeout: For those that come to connect.

    Returns:
        Links to those partners, and all such pairs of the world. Nobody finds anybody unless the world talks over gloo:
        tensors of other backends are not in this kind of memory.
    """
    if dist.get_backend() != "gloo" or not peer_memory.is_possible():
        return {}, Pairs()
    secret = secrets.token_bytes(_SECRET_BYTES)
    kept = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
    with ExitStack() as until_met:
        door = until_met.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        path = _open(door, until_met)
        card = _Card(_machine(), os.getpid(), path, secret, kept.data_ptr())
        cards: list[_Card] = _all_gather(card)
        readable = {other for other in partners if _is_readable(cards[other], card.machine)}
        pairs = _mutual(_all_gather(readable))
        peers = [other for other in partners if frozenset((rank, other)) in pairs]
        links = _connect(cards, [other for other in peers if other < rank], rank)
        links |= _accept(door, cards, sum(other > rank for other in peers), timeout)
        dist.barrier()  # the door stays until all have come in
    return links, pairs


def _open(door: socket.socket, until_met: ExitStack) -> str:
    """Where others can reach this process; empty if there is no place for a socket: a path of 107 bytes at most."""
    for base in (None, "/tmp"):
        try:
            folder = until_met.enter_context(tempfile.TemporaryDirectory(prefix="longctx-", dir=base))
            door.bind(path := str(Path(folder) / "door"))
            door.listen(_MOST_RANKS)
            return path
        except OSError:
            continue
    return ""


def _mutual(readable: Sequence[set[int]]) -> Pairs:
    return frozenset(
        frozenset((rank, other)) for rank, others in enumerate(readable) for other in others if rank in readable[other]
    )


def _all_gather(value) -> list:  # noqa: ANN001  any that can be pickled
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _machine() -> str:
    """Names this boot of this machine and, where a launcher tells, this node: an emulated one is a node of its own."""
    node = next((os.environ[name] for name in _NODE_VARIABLES if name in os.environ), "")
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else secrets.token_hex(_SECRET_BYTES)
    return f"{boot}/{node}"


def _is_readable(card: _Card, machine: str) -> bool:
    if card.machine != machine or not card.socket_path:
        return False
    found = torch.zeros(_SECRET_BYTES, dtype=torch.uint8)
    try:
        peer_memory.read(card.process, [card.address], [found])
        return bytes(found.tolist()) == card.secret and Path(card.socket_path).exists()
    except OSError:  # another container's or user's process, or one that the system protects
        return False


def _connect(cards: Sequence[_Card], ranks: Sequence[int], rank: int) -> dict[int, Link]:
    links = {}
    for other in ranks:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(cards[other].socket_path)
        end.send(str(rank).encode())
        links[other] = Link(end, cards[other].process)
    return links


def _accept(door: socket.socket, cards: Sequence[_Card], count: int, timeout: timedelta) -> dict[int, Link]:
    links = {}
    door.settimeout(timeout.total_seconds())
    for _ in range(count):
        end, _ = door.accept()
        other = int(end.recv(16))
        links[other] = Link(end, cards[other].process)
    return links
