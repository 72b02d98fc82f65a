"""A small cluster on one machine: fast links inside a node, slow ones between nodes.

Bandwidth is emulated, with Linux network namespaces and token buckets (see ``testing.wiring``); delay is not, and all
ranks share this machine's cores. Needs root, and the programs ``ip`` and ``tc`` (Debian: iproute2).
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

from lightning_longctx.testing.wiring import DEVICE, Command, Wiring, address

_PORT = "29577"
_PROGRAMS = ("ip", "tc")


class ClusterUnavailableError(RuntimeError):
    """This machine cannot emulate a cluster; the message says why."""


@dataclass(frozen=True)
class Place:
    """How to start one rank where it belongs.

    Args:
        prefix: Words before its command: ``subprocess.Popen([*place.prefix, "python", ...])``.
        environment: Variables it needs, over those of this process: what ``torch.distributed`` and Lightning read.
    """

    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


class Cluster:
    """Network namespaces and cables while open; whoever opens it starts and ends the processes inside.

    Several can exist at the same time; each removes what it made, and nothing else.

    Args:
        num_nodes: Nodes, at least one.
        ranks_per_node: Ranks on each; at most 16 in all.
        nic_mbit: Rate of a network card between nodes, each way, in Mbit per second.
        shared_nic: Whether the ranks of a node share one card. Otherwise each has its own.

    Raises:
        ValueError: The sizes make no cluster.
    """

    def __init__(self, num_nodes: int, ranks_per_node: int, nic_mbit: float, shared_nic: bool = False) -> None:
        # Random, since processes of other containers may have the same id and see the same namespaces.
        tag = f"longctx-{os.getpid()}-{secrets.token_hex(3)}"
        self.wiring = Wiring(tag, num_nodes, ranks_per_node, nic_mbit, shared_nic)

    def __enter__(self) -> Cluster:
        if reason := _missing():
            raise ClusterUnavailableError(reason)
        try:
            for name in self.wiring.namespaces:
                _run(("ip", "netns", "add", name))
            for command in self.wiring.commands():
                _run(command)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        existing = {line.split()[0] for line in _run(("ip", "netns", "list")).splitlines() if line}
        left = [name for name in self.wiring.namespaces if name in existing and not _deleted(name)]
        if left:
            raise RuntimeError(f"could not remove the network namespaces {left}: try `ip netns del NAME`.")

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes."""
        return self.wiring.num_ranks

    @property
    def places(self) -> tuple[Place, ...]:
        """By rank, node by node."""
        return tuple(map(self._place, range(self.num_ranks)))

    def _place(self, rank: int) -> Place:
        wiring = self.wiring
        node, local_rank = divmod(rank, wiring.ranks_per_node)
        environment = {
            "RANK": rank,
            "WORLD_SIZE": wiring.num_ranks,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": wiring.ranks_per_node,
            "NODE_RANK": node,
            "GROUP_RANK": node,
            "MASTER_ADDR": address(0),
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": DEVICE,
            "TP_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": 1,
        }
        prefix = ("ip", "netns", "exec", wiring.namespace(rank))
        return Place(prefix, {name: str(value) for name, value in environment.items()})


@functools.cache
def why_unavailable() -> str | None:
    """Why no cluster can be emulated here, in words; None if it can. Makes the smallest one to find out."""
    try:
        with Cluster(2, 1, nic_mbit=100):
            return None
    except ClusterUnavailableError as reason:
        return str(reason)


def _missing() -> str | None:
    if sys.platform != "linux":
        return f"an emulated cluster needs Linux network namespaces, which {sys.platform} has not."
    if os.geteuid() != 0:
        return "an emulated cluster needs root, to make network namespaces: use sudo, or be root in a container."
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"an emulated cluster needs the program {' and '.join(missing)}: install iproute2."
    return None


def _deleted(name: str) -> bool:
    return subprocess.run(("ip", "netns", "del", name)).returncode == 0


def _run(command: Command) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ClusterUnavailableError(
            f"no emulated cluster here: `{' '.join(command)}` says {done.stderr.strip() or done.returncode}. It needs "
            "a kernel with network namespaces, veth, bridge and tbf, and the right to use them (in a container: "
            "privileged, or CAP_SYS_ADMIN and CAP_NET_ADMIN)."
        )
    return done.stdout
