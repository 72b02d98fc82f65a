"""How keys and values travel: options of a run, plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_longctx.topology.links import Links

ScheduleName = Literal["double_ring", "direct", "all_gather"]
SCHEDULES: tuple[ScheduleName, ...] = ("double_ring", "direct", "all_gather")


@dataclass(frozen=True)
class Communication:
    """How keys, values and their gradients travel between context ranks.

    Args:
        schedule: ``double_ring`` passes them from neighbour to neighbour inside inner rings, and between inner rings;
            ``direct`` sends them from their home straight to every inner ring that needs them, once, and on from there;
            ``all_gather`` sends them from home to every rank at once. All send only what is needed. ``auto`` counts
            which is the fastest over ``links``.
        keep_kv: Keep keys and values that came from other inner rings until backward, instead of sending them again:
            a third less traffic between inner rings, for up to ``windows - 1`` shards of keys and values more memory a
            layer.
        dtype: What is sent is rounded to this; sums stay wide. null sends keys and values as they are, and gradients
            in float32 (float64 for float64). The numbers then depend on how many ranks there are, by that rounding.
        links: Speeds that ``auto`` counts with.
        shared_memory: Ranks of one machine that talk over gloo read what is sent out of each other's memory, where the
            system lets them; false sends it through sockets, as between machines. The numbers are the same.
    """

    schedule: Literal["auto", "double_ring", "direct", "all_gather"] = "auto"
    keep_kv: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    links: Links = Links()
    shared_memory: bool = True

    def __post_init__(self) -> None:
        if self.schedule not in ("auto", *SCHEDULES):
            raise ValueError(
                f"communication.schedule={self.schedule!r} is unknown; choose auto or one of {list(SCHEDULES)}."
            )
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"communication.dtype={self.dtype!r} is unknown: use float32, bfloat16, float16, null.")
