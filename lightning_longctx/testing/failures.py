"""What the replies of a world mean: which rank is to blame, and whether the world can go on. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from lightning_longctx.testing.messages import Reply

GRACE_SECONDS = 2.0
"""How long the others may still answer after one rank has failed: they are likely to wait for it in a collective."""
MAX_HANDLES = 600
"""Process groups that calls leave behind hold sockets and threads: past this a new world costs less than an outage."""

Replies = Mapping[int, Reply | None]
"""By rank, in the order they came; None for a rank whose process ended, nothing for one that is late."""

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|timed out waiting", re.IGNORECASE
)


class RankError(RuntimeError):
    """A function failed on some rank.

    Args:
        message: Names the rank, with its traceback and the end of its output.
        rank: The rank taken for the cause.
        failures: For each rank that failed the last line of its error, ``Type: message``.
    """

    def __init__(self, message: str, rank: int, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.failures = failures


def is_spent(replies: Replies, num_ranks: int) -> bool:
    """Whether the world can't be trusted with another call."""
    answers = [reply for reply in replies.values() if reply is not None and reply.intact]
    if len(answers) < num_ranks or max(reply.num_handles for reply in answers) > MAX_HANDLES:
        return True
    # All refused alike (a wrong option, say): no message is under way. Otherwise one may be, to a rank that left.
    return len({reply.summary for reply in answers}) > 1


def summaries(replies: Replies, codes: Mapping[int, int]) -> dict[int, str]:
    """One line for each rank that failed, in the order the failures came; ``codes`` are exit codes by rank."""
    return {
        rank: _obituary(codes.get(rank)) if reply is None else reply.summary
        for rank, reply in replies.items()
        if reply is None or reply.error
    }


def root_cause(failed: Mapping[int, str]) -> int:
    """The first rank whose error is not the mere consequence of a peer's: a closed connection, say."""
    return min(failed, key=lambda rank: bool(_CONSEQUENCE.search(failed[rank])))


def rank_error(replies: Replies, failed: dict[int, str], num_ranks: int, outputs: Mapping[int, str]) -> RankError:
    """The error to raise; ``outputs`` are the last lines that ranks wrote (stacks, for a rank that is late)."""
    cause = root_cause(failed)
    reply = replies[cause]
    parts = [f"rank {cause} of {num_ranks} failed: {failed[cause]}", "" if reply is None else reply.error]
    for rank in range(num_ranks):
        if rank in failed and rank != cause:
            parts.append(f"rank {rank} failed too: {failed[rank]}")
        elif rank not in replies:
            parts.append(f"rank {rank} did not answer within {GRACE_SECONDS:g} s after that:\n{outputs[rank]}")
    if outputs[cause]:
        parts.append(f"--- output of rank {cause}:\n{outputs[cause]}")
    return RankError("\n".join(filter(None, parts)), cause, failed)


def late_error(replies: Replies, num_ranks: int, seconds: float, outputs: Mapping[int, str]) -> TimeoutError:
    """The error for ranks that did not answer while none failed."""
    late = [rank for rank in range(num_ranks) if rank not in replies]
    details = "\n".join(f"--- rank {rank}, output and stacks:\n{outputs[rank]}" for rank in late)
    names = ", ".join(map(str, late))
    return TimeoutError(
        f"ranks {names} of {num_ranks} did not answer within {seconds:g} s ({len(replies)} did).\n{details}"
    )


def _obituary(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
