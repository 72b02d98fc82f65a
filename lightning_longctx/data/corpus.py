"""Where documents come from: files in a fixed order, each pinned by the hash of its bytes.

A corpus is a *hash list*: the sorted (relative name, sha256) of its files. Two runs with the same list train on the
same text whatever the machine, folder or date of the files; when a file changes, so does the list, and the token cache
is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = frozenset(
    ".c .cc .cpp .cu .go .h .hpp .html .java .js .md .py .pyi .rs .rst .sh .tex .text .ts .txt".split()
)
JSONL_SUFFIX = ".jsonl"
NO_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """Files to read, sorted by name.

    Args:
        root: Folder that the names are relative to.
        names: Relative names in POSIX form.
    """

    root: Path
    names: tuple[str, ...]

    def path(self, name: str) -> Path:
        """Where a file is."""
        return self.root / name


def standard_library() -> Corpus:
    """The ``.py`` files of the running interpreter's standard library, without its tests and installed packages.

    Real, long and offline: some 12 MB in 700 files for Python 3.11. Other versions of Python have other files, and so
    another hash list.

    Raises:
        ValueError: The interpreter keeps no source files, as in some embedded distributions.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = _walk(root, frozenset({".py"}), skipped=NO_LIBRARY | TEST_FOLDERS)
    if not names:
        raise ValueError(
            f"path=null means the standard library, but {root} has no .py files. Set path to a folder of text files."
        )
    return Corpus(root, tuple(names))


def folder_or_file(path: Path) -> Corpus:
    """Text files below a folder, hidden ones left out, or one file.

    Every text file is a document; every line of a ``.jsonl`` file is one, with its text in the field ``text``.

    Raises:
        ValueError: Nothing is there, or nothing that can be read as text.
    """
    path = path.expanduser().resolve()
    readable = TEXT_SUFFIXES | {JSONL_SUFFIX}
    if path.is_file():
        if path.suffix.lower() not in readable:
            raise ValueError(f"path={path} is no text file: its suffix must be one of {_listed(readable)}.")
        return Corpus(path.parent, (path.name,))
    if not path.is_dir():
        raise ValueError(f"path={path} does not exist. Set path to a folder of text files, a .jsonl file, or null.")
    names = _walk(path, readable)
    if not names:
        raise ValueError(f"path={path} has no text files: it needs files that end in one of {_listed(readable)}.")
    return Corpus(path, tuple(names))


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_documents(corpus: Corpus, name: str) -> Iterator[tuple[str, str]]:
    """The (name, text) of every document in one file; a line of ``.jsonl`` is called ``file.jsonl:line``.

    Bytes that are not UTF-8 become U+FFFD, line ends stay as they are.

    Raises:
        ValueError: A line of a ``.jsonl`` file is not an object with a string in its field ``text``.
    """
    path = corpus.path(name)
    if path.suffix.lower() != JSONL_SUFFIX:
        yield name, path.read_bytes().decode("utf-8", errors="replace")
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{name}:{number}", _text_field(line, path, number)


def _text_field(line: bytes, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}). A .jsonl file has one object a line.") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{path}, line {number}: needs an object with its text in the field "text".')
    return text


def _walk(root: Path, suffixes: frozenset[str], skipped: frozenset[str] = frozenset()) -> list[str]:
    found = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in skipped and not name.startswith(".")]
        paths = (Path(folder, name) for name in files if not name.startswith("."))
        found += [path.relative_to(root).as_posix() for path in paths if path.suffix.lower() in suffixes]
    return sorted(found)


def _listed(suffixes: frozenset[str]) -> str:
    return " ".join(sorted(suffixes))
