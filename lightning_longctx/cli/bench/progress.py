"""A progress bar that takes no processor time from what is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def stages(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar of ``total`` stages on stderr while open.

    Yields:
        A function to call with a word on the stage that begins.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn when a stage begins and at no other time: the usual ten times a second would compete with the ranks.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def advance(doing: str) -> None:
            nonlocal begun
            progress.update(task, description=doing, completed=begun, refresh=True)
            begun += 1

        yield advance
