"""What a reader may count on in every file: short, named after its question, documented, nothing swallowed."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import lightning_longctx
from tests.architecture.places import PACKAGE, place, sources, tree

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
FORBIDDEN_FILES = {"utils", "util", "helpers", "helper", "common", "misc"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def found(problems: list[str]) -> str:
    return "\n" + "\n".join(problems)


def test_files_are_short() -> None:
    long = {place(path): len(path.read_text().splitlines()) for path in sources()}
    problems = [f"{name}: {lines} lines" for name, lines in long.items() if lines > MAX_FILE_LINES]
    assert not problems, found(problems)


def test_functions_are_short() -> None:
    problems = [
        f"{place(path, node)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, FUNCTIONS) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not problems, found(problems)


def test_file_names_answer_a_question() -> None:
    problems = [place(path) for path in sources() if FORBIDDEN_FILES & {path.stem, path.parent.name}]
    assert not problems, found(problems)


def test_public_names_have_docstrings() -> None:
    problems = []
    for path in sources("lightning_longctx"):
        if not ast.get_docstring(tree(path)):
            problems.append(f"{place(path)}: no module docstring")
        for node in tree(path).body:
            named = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")
            if named and not ast.get_docstring(node):
                problems.append(f"{place(path, node)}: {node.name} has no docstring")
    assert not problems, found(problems)


def own_parameters(exported: object) -> list[str]:
    """Parameters that a user can set on an exported class or function (no ``*args``, no ``**kwargs``)."""
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    signature = inspect.signature(exported)  # type: ignore[arg-type]
    return [name for name, parameter in signature.parameters.items() if parameter.kind not in skipped]


@pytest.mark.parametrize("name", lightning_longctx.__all__)
def test_options_are_documented(name: str) -> None:
    """The signature is the configuration, and the command line's help is taken from these docstrings."""
    exported = getattr(lightning_longctx, name)
    text = inspect.getdoc(exported) or ""
    if inspect.isclass(exported) and not is_dataclass(exported):
        text += "\n" + (inspect.getdoc(exported.__init__) or "")
    missing = [
        option for option in own_parameters(exported) if not re.search(rf"^\s*{option}\b.*:", text, re.MULTILINE)
    ]
    assert not missing, f"{name} does not document {missing}"


def test_nothing_is_left_unfinished() -> None:
    # Built from parts, so that this file does not find itself.
    unfinished = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error"]))
    problems = [
        f"{place(path)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if unfinished.search(line)
    ]
    assert not problems, found(problems)


def swallows(handler: ast.ExceptHandler) -> bool:
    """A bare ``except``, or one that only passes on anything at all."""
    anything = isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    only_pass = all(isinstance(statement, ast.Pass) for statement in handler.body)
    return handler.type is None or (anything and only_pass)


def test_no_error_is_swallowed() -> None:
    problems = [
        place(path, node)
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert not problems, found(problems)


def private_upstream(node: ast.AST) -> str | None:
    """The dotted name, if this is a private name of torch or Lightning."""
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Attribute):
        names = [ast.unparse(node)]
    else:
        return None
    private = re.compile(r"^(torch|dist|lightning|pytorch_lightning|L|pl)(\.\w+)*?\._(?!_)")
    return next((name for name in names if private.match(name)), None)


def test_private_upstream_names_have_one_home() -> None:
    def private_names(path: Path) -> list[str]:
        named = ((node, private_upstream(node)) for node in ast.walk(tree(path)))
        return [f"{place(path, node)}: {name}" for node, name in named if name]

    problems = [
        problem
        for path in sources("lightning_longctx")
        if path.parent != PACKAGE / "_upstream"
        for problem in private_names(path)
    ]
    assert not problems, "\nmove to _upstream:" + found(problems)
