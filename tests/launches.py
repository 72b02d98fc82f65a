"""The environment of programs that tests launch as a user would, with processes that meet at a port."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "NODE_RANK")
# Kernels give away ports from 32768 (Linux) or 49152 (others) on.
_PORTS = range(16384, 32768)


def launch_environment(**more: str) -> dict[str, str]:
    """This process's variables without a place in another launch; one thread, this checkout, and a port to meet at.

    Left to itself Lightning asks the kernel for a free port, gives it back, and listens there once all processes have
    been imported, which takes seconds. Meanwhile tests that run beside open hundreds of sockets: one could have it.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _PLACE}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(_port_of_our_own())} | more


def _port_of_our_own() -> int:
    """A free port which the kernel gives to no process that does not name it."""
    choose = random.SystemRandom()  # other test runs on this machine choose too; tests may have seeded `random`
    while True:
        port = choose.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
