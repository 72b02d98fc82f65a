"""A thread that copies while others compute: tasks in order, each of which someone may wait for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Task(Generic[Result]):
    """Something that the thread does once; what it held is let go as soon as it is done."""

    def __init__(self, run: Callable[[], Result]) -> None:
        self._run: Callable[[], Result] | None = run
        self._done = threading.Event()
        self._result: Result | None = None
        self.error: BaseException | None = None

    def execute(self) -> None:
        """Do it, unless it was called off."""
        run, self._run = self._run, None
        try:
            if run is not None:
                self._result = run()
        except BaseException as error:  # for whoever waits
            self.error = error
        finally:
            del run
            self._done.set()

    def call_off(self) -> None:
        """Nobody needs it; what has begun is finished."""
        self._run = None

    @property
    def is_done(self) -> bool:
        """Whether it is over, and what it held let go."""
        return self._done.is_set()

    def wait(self) -> Result:
        """Its result, when it is done; raises what it raised."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]


class Clerk:
    """Begins with the first task. A forked process has no such thread: there, every task is refused.

    Args:
        name: Of the thread.
        at_end: Called by the thread when it ends, or by ``stop`` if there is none.
    """

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self._name, self._at_end = name, at_end
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def check(self) -> None:
        """Raise RuntimeError in a process that was forked from the one that made this."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self._name} belongs to process {self._process}, and this is process {os.getpid()}, forked from it: "
                "a training step runs in the process that made its strategy, not in workers of a loader."
            )

    def begin(self, task: Task) -> None:
        """Let the thread do it after all others."""
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._queue, self._at_end), daemon=True, name=self._name
            )
            self._thread.start()
        self._queue.put(task)

    def stop(self) -> None:
        """End the thread after the tasks that it has; in a forked process, nothing."""
        if os.getpid() != self._process:
            return
        if self._thread is None:
            self._at_end()
            return
        self._queue.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector may call from anywhere
            self._thread.join()


def _work(queue: SimpleQueue[Task | None], at_end: Callable[[], None]) -> None:
    while _next(queue):
        pass
    at_end()


def _next(queue: SimpleQueue[Task | None]) -> bool:
    # A function of its own: its names, and the memory behind them, are gone while the thread waits.
    task = queue.get()
    if task is not None:
        task.execute()
    return task is not None
