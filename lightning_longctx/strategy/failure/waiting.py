"""Where a rank waited when an error of the connection ended its wait: which collective, on which axis, with whom."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_longctx import _upstream
from lightning_longctx.attention.peer_errors import HEADS, PeerError

_WORLD = "default_pg"
_MESH = "mesh_"


class Wait(NamedTuple):
    """A wait for others.

    Args:
        place: Which axis, and for what.
        ranks: Global ranks that take part; for a message, both ends.
    """

    place: str
    ranks: tuple[int, ...]


def find_wait(error: BaseException) -> Wait | None:
    """Where the error was raised, read from its stack; None if no process group is on it.

    gloo and NCCL name neither the group nor the operation, but whoever called them holds both.
    """
    if isinstance(error, PeerError):
        return Wait(error.place, tuple(sorted({error.peer, dist.get_rank() if dist.is_initialized() else 0})))
    for frame in _innermost_first(error.__traceback__):
        if (group := _group_of(frame)) is not None:
            return Wait(f"{axis_of(group.group_desc)}, in {frame.f_code.co_name}", _ranks_of(group))
    return None


def pass_of(error: BaseException) -> str:
    """``forward`` or ``backward`` of attention if that is where an error came from, else empty."""
    for frame in _innermost_first(error.__traceback__):
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "lightning_longctx.attention.ring" and name in ("forward", "backward"):
            return name
    return ""


def axis_of(description: str) -> str:
    """How a process group's description reads in an error."""
    if description in (_WORLD, "", "undefined"):
        return "all ranks"
    if description.startswith("heads of "):
        return HEADS
    return f"the {description.removeprefix(_MESH)} axis"


def _innermost_first(traceback: TracebackType | None) -> Iterator[FrameType]:
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return reversed(frames)


def _group_of(frame: FrameType) -> dist.ProcessGroup | None:
    held = frame.f_locals
    for value in held.values():
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, DeviceMesh) and value.ndim == 1:
            return value.get_group()
    if "self" in held and (group := _upstream.waited_group(held["self"])) is not None:
        return group
    of_torch = frame.f_globals.get("__name__") == dist.distributed_c10d.__name__  # type: ignore[attr-defined]
    return dist.group.WORLD if of_torch and held.get("group", frame) is None else None


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group)) if _upstream.is_open(group) else ()
