"""Tokens of a corpus on disk: one memory map, made once and shared by all processes.

Below the cache folder, ``<key>/`` holds ``tokens.bin`` (all documents, each followed by its end-of-document id),
``offsets.npy`` (int64, where each begins, and the total) and ``corpus.json`` (hash list, tokenizer and the names of
the documents). The key is the hash of hash list and tokenizer, so a changed file or tokenizer makes a new folder and
never touches one that a running job has mapped. ``manifests/`` remembers each file's size, date and SHA-256, so that
only changed files are hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from lightning_longctx.data.corpus import Corpus, hash_file, read_documents
from lightning_longctx.data.packing import Spans
from lightning_longctx.data.tokenizer import Tokenizer, token_dtype

FORMAT = 1
"""Raise it whenever the files of a cache folder change their meaning."""


@dataclass(frozen=True)
class FilePin:
    """What is known of a file: its hash, and the signs by which one sees that it has not changed since."""

    size: int
    mtime_ns: int
    sha256: str


class TokenStore:
    """A tokenized corpus, read only.

    Pickles as its folder, so that spawned workers map the file themselves: a pickled memory map is a copy.

    Args:
        folder: What ``prepare_store`` made.

    Raises:
        ValueError: The folder is incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        about = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        self.names: tuple[str, ...] = tuple(about["documents"])
        self.offsets = np.load(folder / "offsets.npy")
        dtype = np.dtype(about["dtype"])
        expected, found = int(self.offsets[-1]) * dtype.itemsize, (folder / "tokens.bin").stat().st_size
        if expected != found:
            raise ValueError(f"{folder / 'tokens.bin'} has {found} bytes instead of {expected}: delete {folder}.")
        self.tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")

    @property
    def spans(self) -> Spans:
        """Start and stop of every document, [n, 2]."""
        return np.stack((self.offsets[:-1], self.offsets[1:]), axis=1)

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.folder,)


def default_cache_dir() -> Path:
    """``lightning_longctx`` in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_longctx"


def prepare_store(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path) -> TokenStore:
    """Hash, tokenize and store a corpus, unless it is stored already.

    Safe for several processes: what is made appears under its name at once and complete, or not at all.

    Raises:
        ValueError: The corpus has no documents, or the tokenizer gives an id outside its vocabulary.
    """
    pins = pin_files(corpus, cache_dir)
    _replace_text(_manifest(corpus, cache_dir), json.dumps({name: vars(pin) for name, pin in pins.items()}))
    folder = cache_dir / store_key(pins, tokenizer)
    if not folder.is_dir():
        _make_store(corpus, pins, tokenizer, folder)
    return TokenStore(folder)


def open_store(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path) -> TokenStore:
    """What ``prepare_store`` stored; writes nothing.

    Raises:
        ValueError: It is not there.
    """
    folder = cache_dir / store_key(pin_files(corpus, cache_dir), tokenizer)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} does not exist: call prepare_data() first, with a cache_dir that every process of this node "
            "sees, and do not change the text files meanwhile."
        )
    return TokenStore(folder)


def pin_files(corpus: Corpus, cache_dir: Path) -> dict[str, FilePin]:
    """Pin of every file, by name; a file whose size and date are as remembered is not read."""
    manifest = _manifest(corpus, cache_dir)
    known = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    return {name: _pin(corpus.path(name), known.get(name)) for name in _progress(corpus.names, "Hashing text")}


def store_key(pins: Mapping[str, FilePin], tokenizer: Tokenizer) -> str:
    """Name of the store: depends on names and hashes of files and on the tokenizer, not on folders and dates."""
    content = [FORMAT, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos_id, _hash_list(pins)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _pin(path: Path, known: Mapping[str, Any] | None) -> FilePin:
    now = path.stat()
    if known is not None and (known["size"], known["mtime_ns"]) == (now.st_size, now.st_mtime_ns):
        return FilePin(**known)
    return FilePin(now.st_size, now.st_mtime_ns, hash_file(path))


def _make_store(corpus: Corpus, pins: Mapping[str, FilePin], tokenizer: Tokenizer, folder: Path) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    documents, offsets = [], [0]
    with TemporaryDirectory(prefix=".making-", dir=folder.parent) as temporary:
        made = Path(temporary, "store")
        made.mkdir()
        with (made / "tokens.bin").open("wb") as file:
            for name in _progress(corpus.names, "Tokenizing text"):
                for document, text in read_documents(corpus, name):
                    tokens = _with_eos(tokenizer, text).astype(dtype)
                    tokens.tofile(file)
                    documents.append(document)
                    offsets.append(offsets[-1] + len(tokens))
        if not documents:
            raise ValueError(f"the files in path={corpus.root} hold no documents. Set path to a folder with text.")
        np.save(made / "offsets.npy", np.asarray(offsets, dtype=np.int64))
        about = {"dtype": dtype.name, "tokenizer": tokenizer.fingerprint, "files": _hash_list(pins)}
        (made / "corpus.json").write_text(json.dumps({**about, "documents": documents}), encoding="utf-8")
        _publish(made, folder)


def _with_eos(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    tokens = np.append(np.asarray(tokenizer.encode(text), dtype=np.int64), tokenizer.eos_id)
    if not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.fingerprint} gave ids from {tokens.min()} to {tokens.max()}, but its vocab_size is "
            f"{tokenizer.vocab_size}. Every id, eos_id included, must be at least 0 and below vocab_size."
        )
    return tokens


def _publish(made: Path, folder: Path) -> None:
    try:
        os.replace(made, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster, with the same content
            raise


def _replace_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".making-", dir=path.parent) as temporary:
        made = Path(temporary, path.name)
        made.write_text(text, encoding="utf-8")
        os.replace(made, path)


def _manifest(corpus: Corpus, cache_dir: Path) -> Path:
    where = hashlib.sha256(str(corpus.root).encode()).hexdigest()[:20]
    return cache_dir / "manifests" / f"{where}.json"


def _hash_list(pins: Mapping[str, FilePin]) -> list[tuple[str, str]]:
    return [(name, pin.sha256) for name, pin in pins.items()]


def _progress(names: tuple[str, ...], title: str) -> Any:
    console = Console(stderr=True)
    quiet = rank_zero_only.rank != 0 or not console.is_terminal
    return track(names, title, console=console, transient=True, disable=quiet)
