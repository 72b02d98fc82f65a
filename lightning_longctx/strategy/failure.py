"""When one rank fails: say which, and let no process stay behind."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

GRACE_SECONDS = 2.0
"""How long other processes may take to print their own error."""

LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
NOT_CALLED = "mixed torch.tensor and dtensor"


def explain(exception: BaseException, rank: int, world_size: int) -> None:
    """Add notes to an error: where it happened, and what it means if its own words do not say."""
    text = str(exception).lower()
    if world_size > 1:
        exception.add_note(f"(on rank {rank} of {world_size})")
    if any(sign in text for sign in LOST_PEER):
        exception.add_note("Another rank has ended: its own error, printed by that process, is the cause.")
    if NOT_CALLED in text:
        exception.add_note(
            "A parameter was used outside the call of the module that holds it. Layers in an nn.ModuleList are "
            "distributed one by one: call the layer itself, layer(x), not a part of it, layer.attention(x)."
        )


def end_processes(processes: Sequence[subprocess.Popen], grace: float = GRACE_SECONDS) -> None:
    """End what this process has launched: a rank that waits in a collective for one that failed would wait for long."""
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
