"""Which cables an emulated cluster has: pure lists of ``ip`` and ``tc`` commands, run by ``testing.cluster``.

Every rank has one network namespace and one address, on ``nic0``. The route to another rank decides the wire: to ranks
of the same node ``intra0``, to the node's bridge, as fast as the kernel copies; to other nodes ``nic0``, to the spine,
through a token bucket at both ends: a full-duplex network card of that rate. One process group over ``nic0`` addresses
then has fast links inside a node and slow ones between nodes. Bridges live in a namespace of their own, so that nothing
is added to the host's network.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 16
DEVICE = "nic0"
_MTU = "9000"
_BURST_BYTES = 128 << 10  # small enough that a message of a megabyte meets the rate
_QUEUE_BYTES = 16 << 20
_REFILL_SECONDS = 0.004  # a bucket must hold what the rate allows between two timer ticks

Command = tuple[str, ...]


@dataclass(frozen=True)
class Wiring:
    """An emulated cluster's shape.

    Args:
        tag: What its namespaces' names begin with.
        num_nodes: Nodes, at least one.
        ranks_per_node: Ranks on each.
        nic_mbit: Rate of a network card, each way, in Mbit per second.
        shared_nic: Whether the ranks of a node share one card. Otherwise each has its own.

    Raises:
        ValueError: A size is not positive, or there are more than 16 ranks.
    """

    tag: str
    num_nodes: int
    ranks_per_node: int
    nic_mbit: float
    shared_nic: bool = False

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node", "nic_mbit"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value} must be positive.")
        if self.num_ranks > MAX_RANKS:
            raise ValueError(
                f"{self.num_nodes} nodes x {self.ranks_per_node} ranks are {self.num_ranks} processes on one machine: "
                f"use at most {MAX_RANKS}."
            )

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def switches(self) -> str:
        """Name of the namespace of the bridges."""
        return f"{self.tag}-sw"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Names of all namespaces: the bridges', then one for each rank."""
        return (self.switches, *(self.namespace(rank) for rank in range(self.num_ranks)))

    def namespace(self, rank: int) -> str:
        """Name of a rank's namespace."""
        return f"{self.tag}-r{rank}"

    def node(self, rank: int) -> int:
        """Node of a rank."""
        return rank // self.ranks_per_node

    def commands(self) -> list[Command]:
        """What to run, in order, once the namespaces exist."""
        commands = self._bridges()
        for rank in range(self.num_ranks):
            commands += self._cables(rank) + self._routes(rank)
        return commands

    def _bridges(self) -> list[Command]:
        commands = self._bridge("spine")
        for node in range(self.num_nodes):
            commands += self._bridge(f"node{node}")
            if self.shared_nic:  # the node's ranks meet on one more bridge, and share its cable to the spine
                commands += self._bridge(f"up{node}")
                below, above = f"below{node}", f"above{node}"
                ends = ("mtu", _MTU, "type", "veth", "peer", "name", above, "mtu", _MTU)
                commands.append(_ip(self.switches, "link", "add", below, *ends))
                commands += [self._plug(below, f"up{node}"), self._plug(above, "spine")]
                commands += [self._limit(self.switches, end) for end in (below, above)]
        return commands

    def _bridge(self, name: str) -> list[Command]:
        add = _ip(self.switches, "link", "add", name, "type", "bridge")
        return [add, _ip(self.switches, "link", "set", name, "up", "mtu", _MTU)]

    def _cables(self, rank: int) -> list[Command]:
        space, node = self.namespace(rank), self.node(rank)
        commands = []
        for device, bridge in (("intra0", f"node{node}"), (DEVICE, f"up{node}" if self.shared_nic else "spine")):
            port = f"{device[0]}{rank}"
            ends = ("mtu", _MTU, "type", "veth", "peer", "name", device, "netns", space)
            commands.append(_ip(self.switches, "link", "add", port, *ends))
            commands.append(self._plug(port, bridge))
            commands.append(_ip(space, "link", "set", device, "up", "mtu", _MTU))
        if not self.shared_nic:  # what leaves, and what the switch passes on to it
            commands += [self._limit(space, DEVICE), self._limit(self.switches, f"{DEVICE[0]}{rank}")]
        return commands

    def _routes(self, rank: int) -> list[Command]:
        space = self.namespace(rank)
        own = ("addr", "add", f"{address(rank)}/32", "dev", DEVICE)
        commands = [_ip(space, "link", "set", "lo", "up"), _ip(space, *own)]
        for peer in range(self.num_ranks):
            if peer != rank:
                device = "intra0" if self.node(peer) == self.node(rank) else DEVICE
                way = (f"{address(peer)}/32", "dev", device, "src", address(rank), "congctl", "cubic", "initcwnd", "64")
                commands.append(_ip(space, "route", "add", *way))
        return commands

    def _plug(self, port: str, bridge: str) -> Command:
        return _ip(self.switches, "link", "set", port, "master", bridge, "up")

    def _limit(self, space: str, device: str) -> Command:
        burst = max(_BURST_BYTES, round(self.nic_mbit * 1e6 / 8 * _REFILL_SECONDS))
        bucket = ("rate", f"{round(self.nic_mbit * 1000)}kbit", "burst", str(burst), "limit", str(_QUEUE_BYTES))
        return ("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def address(rank: int) -> str:
    """A rank's address."""
    return f"10.77.0.{rank + 1}"


def _ip(space: str, *words: str) -> Command:
    return ("ip", "-n", space, *words)
