"""Entry point of ``lightning-longctx``: Lightning's own subcommands, and ours beside them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

COMMANDS: dict[str, str] = {
    "bench": "lightning_longctx.cli.bench:main",
    "consolidate": "lightning_longctx.cli.consolidate:main",
    "explain": "lightning_longctx.cli.explain:main",
    "export": "lightning_longctx.cli.export:main",
    "recipes": "lightning_longctx.cli.recipes:main",
}
"""Commands besides Lightning's: name -> ``module:function``. The function takes the arguments after the name. A module
is imported when its command is asked for, so that a small command does not wait for torch."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        argv: Arguments after the program's name; the process's own by default. Lightning starts further processes by
            repeating the process's own command line, so give ``argv`` only for runs of one process.

    Raises:
        SystemExit: With code 2 if an option is wrong, after one message on stderr that names it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _import_from_working_directory()
    if arguments and arguments[0] in COMMANDS:
        _load(COMMANDS[arguments[0]])(arguments[1:])
    else:
        _load("lightning_longctx.cli.train:train")(arguments)


def _import_from_working_directory() -> None:
    """Let a recipe name the user's own modules, as ``python -m`` does; an installed script would not find them."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def _load(target: str) -> Callable[[list[str]], None]:
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)
