"""Who is to blame, and whether a world goes on."""

from __future__ import annotations

import pytest

from lightning_longctx.testing.failures import MAX_HANDLES, is_spent, late_error, rank_error, root_cause, summaries
from lightning_longctx.testing.messages import Reply

CLOSED = Reply(error="...", summary="RuntimeError: [../tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
WRONG = Reply(error="Traceback of the cause", summary="ValueError: head=3")
FINE = Reply(payload=b"x")


def test_a_closed_connection_is_never_the_cause_if_there_is_another() -> None:
    failed = summaries({2: CLOSED, 0: FINE, 3: CLOSED, 1: WRONG}, {})
    assert list(failed) == [2, 3, 1] and root_cause(failed) == 1
    assert root_cause(summaries({2: CLOSED, 0: None}, {0: -11})) == 0
    assert root_cause(summaries({2: CLOSED, 1: CLOSED}, {})) == 2
    assert root_cause({3: "ValueError: a", 1: "ValueError: b"}) == 3  # the first that came


def test_message_of_a_rank_error() -> None:
    replies = {2: CLOSED, 1: WRONG, 0: None}
    failed = summaries(replies, {0: -9})
    outputs = {0: "", 1: "printed by 1", 2: "printed by 2", 3: "stack of 3"}
    error = rank_error(replies, failed, 4, outputs)
    assert error.rank == 1 and error.failures == failed
    lines = str(error).splitlines()
    assert lines[:4] == [
        "rank 1 of 4 failed: ValueError: head=3",
        "Traceback of the cause",
        "rank 0 failed too: its process was ended by SIGKILL",
        f"rank 2 failed too: {CLOSED.summary}",
    ]
    assert lines[4].startswith("rank 3 did not answer") and lines[5:] == [
        "stack of 3",
        "--- output of rank 1:",
        "printed by 1",
    ]


def test_message_of_a_timeout() -> None:
    error = late_error({1: FINE}, 3, 2.5, {0: "stack of 0", 1: "not shown", 2: "stack of 2"})
    assert str(error).startswith("ranks 0, 2 of 3 did not answer within 2.5 s (1 did).")
    assert "stack of 0" in str(error) and "stack of 2" in str(error) and "not shown" not in str(error)


@pytest.mark.parametrize(
    ("replies", "spent"),
    [
        ([FINE, FINE], False),
        ([WRONG, WRONG], False),
        ([WRONG, FINE], True),
        ([WRONG, CLOSED], True),
        ([FINE], True),
        ([FINE, None], True),
        ([FINE, Reply(intact=False)], True),
        ([FINE, Reply(num_handles=MAX_HANDLES + 1)], True),
    ],
)
def test_when_a_world_is_replaced(replies: list[Reply | None], spent: bool) -> None:
    assert is_spent(dict(enumerate(replies)), 2) is spent
