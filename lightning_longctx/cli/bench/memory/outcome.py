"""What a run hands to the process that started it: plain values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LONGCTX, DDP = "longctx", "ddp"


@dataclass(frozen=True)
class Outcome:
    """What one policy took, or the longest sequence of one system.

    Args:
        case: Name of the policy.
        system: ``LONGCTX`` or ``DDP``.
        ranks: Processes.
        tokens: Length of a sequence.
        seconds: Of every timed step, its slowest rank.
        growth: Bytes by which memory rose in a step above what was there before, at most.
        allocated: The same in bytes of tensors; None where that was not measured.
        sent: Bytes sent in attention in one step, by rank.
        rings: Forward passes of ring attention in one step.
        kind: Columns of a row that say what was run, from ``heads`` to ``layout``.
        budget: Of a plan that was solved for one, bytes that a step may take.
        predicted: Of such a plan, what ``allocated`` should be.
        capped: A longer sequence was not tried, as an option said.
    """

    case: str
    system: str
    ranks: int
    tokens: int
    seconds: tuple[float, ...]
    growth: int
    allocated: int | None
    sent: tuple[int, ...]
    rings: int
    kind: dict[str, Any]
    budget: int | None = None
    predicted: int | None = None
    capped: bool = False


def hand_over(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write them to a file."""
    path.write_text(json.dumps([asdict(outcome) for outcome in outcomes]), encoding="utf-8")


def receive(path: Path) -> list[Outcome]:
    """Read what ``hand_over`` has written."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    return [Outcome(**{**each, "seconds": tuple(each["seconds"]), "sent": tuple(each["sent"])}) for each in entries]
