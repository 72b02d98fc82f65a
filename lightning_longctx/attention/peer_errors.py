"""What a rank says when a message of another one does not come: where it waited, how long, and for whom."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from lightning_longctx.plan.steps import CHANNELS

Cause = Literal["late", "lost"]
"""The other rank did not come within the timeout, or its process has ended."""

LATE = ("timed out waiting", "timeout caused pair closure")
LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited", "read error")
"""Words of gloo, of the kernel, and of NCCL."""

_RINGS = {
    "kv_inner": "the inner ring of the context axis, for keys and values",
    "kv_outer": "the outer ring of the context axis, for keys and values",
    "grad_inner": "the inner ring of the context axis, for gradients of keys and values",
    "grad_home": "the context axis, for gradients of keys and values that come home",
}
HEADS = "the head axis, for the exchange of tokens and heads"


class PeerError(RuntimeError):
    """A message did not pass between this rank and another one.

    Args:
        cause: Why.
        place: The axis, and what for.
        peer: Global rank of the other.
        seconds: How long this rank waited.
    """

    def __init__(self, cause: Cause, place: str, peer: int, seconds: float) -> None:
        self.cause: Cause = cause
        self.place = place
        self.peer = peer
        rank = dist.get_rank() if dist.is_initialized() else 0
        late = f"rank {rank} timed out waiting {seconds:.1f} s for rank {peer} on {place}."
        lost = f"connection closed by peer: rank {rank} has lost rank {peer} on {place}."
        super().__init__(late if cause == "late" else lost)


def cause_of(error: BaseException) -> Cause | None:
    """Whether an error says that another rank is late or lost; None if it says something else."""
    if isinstance(error, PeerError):
        return error.cause
    text = str(error).lower()
    if any(sign in text for sign in LATE):
        return "late"
    return "lost" if any(sign in text for sign in LOST) else None


def place_of(channel: int) -> str:
    """Where the messages of a channel travel; beyond the ring's channels comes that of head ranks."""
    return _RINGS[CHANNELS[channel]] if channel < len(CHANNELS) else HEADS
