"""Shipped recipes: list them, copy them, and find one by its bare name."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_longctx._resources import recipes_dir

CONFIG_FLAGS = ("-c", "--config")


def main(argv: Sequence[str]) -> None:
    """``lightning-longctx recipes [list | copy NAME]``.

    Raises:
        SystemExit: With code 2 if there is no such recipe, or the copy would overwrite a file.
    """
    parser = argparse.ArgumentParser(prog="lightning-longctx recipes", description="List or copy the shipped recipes.")
    actions = parser.add_subparsers(dest="action", metavar="list|copy")
    actions.add_parser("list", help="name and first line of every recipe (the default)")
    copy = actions.add_parser("copy", help="copy a recipe into the working directory, to edit it")
    copy.add_argument("name", help="a name from the list")
    options = parser.parse_args(list(argv))
    if options.action != "copy":
        return print(listing())
    try:
        print(*copy_recipe(options.name, Path.cwd()), sep="\n")
    except (FileNotFoundError, FileExistsError) as problem:
        parser.error(str(problem))


def listing() -> str:
    """One line for each shipped recipe: its name and the first line of its opening comment."""
    names = [path.relative_to(recipes_dir()).as_posix() for path in shipped()]
    width = max(map(len, names), default=0)
    lines = [f"{name:{width}}  {summary(path)}" for name, path in zip(names, shipped(), strict=True)]
    return "\n".join([*lines, "", "Run one:  lightning-longctx fit --config NAME   (later --config files override)"])


def shipped() -> list[Path]:
    """Whole recipes first, then fragments, by name."""
    return [*sorted(recipes_dir().glob("*.yaml")), *sorted(recipes_dir().glob("fragments/*.yaml"))]


def summary(path: Path) -> str:
    """The first line of a recipe if it is a comment, else nothing."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copy a recipe, and the Python module of the same name if it has one, into ``folder``.

    Raises:
        FileNotFoundError: No shipped recipe has this name.
        FileExistsError: ``folder`` already holds a file of that name.
    """
    source = find(name) or find(f"{name}.yaml")
    if source is None:
        raise FileNotFoundError(f"there is no recipe {name!r}. `lightning-longctx recipes` lists them.")
    files = [path for path in (source, source.with_suffix(".py")) if path.exists()]
    targets = [folder / path.name for path in files]
    if existing := [target for target in targets if target.exists()]:
        raise FileExistsError(f"{existing[0]} exists already: move it away, or copy into another directory.")
    return [Path(shutil.copyfile(path, target)) for path, target in zip(files, targets, strict=True)]


def find(name: str) -> Path | None:
    """The shipped recipe called ``name``, with or without its folder, or None."""
    if Path(name).is_absolute():
        return None
    places = (recipes_dir() / name, recipes_dir() / "fragments" / name)
    return next((place for place in places if place.is_file()), None)


def with_shipped_recipes(arguments: Sequence[str]) -> list[str]:
    """Replace every ``--config NAME`` that is no file here, but a shipped recipe, by the recipe's path.

    Modules next to a recipe become importable (after everything else).
    """
    found, previous = [], ""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if previous in CONFIG_FLAGS:
            argument = _resolved(argument)
        elif flag in CONFIG_FLAGS and equals:
            argument = f"{flag}={_resolved(value)}"
        found.append(argument)
        previous = argument
    return found


def _resolved(name: str) -> str:
    path = Path(name) if Path(name).is_file() else find(name)
    if path is None:
        return name
    if (folder := str(path.absolute().parent)) not in sys.path:
        sys.path.append(folder)
    return str(path)
