"""The token cache: right tokens, made once, made anew when text or tokenizer change, never half made."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from lightning_longctx.data import ByteTokenizer, TokenStore, cache, folder_or_file, open_store, prepare_store

TEXTS = {"a.txt": "first", "b.txt": "", "c.txt": "third é"}


class WideTokenizer(ByteTokenizer):
    vocab_size = 70_000
    eos_id = 69_999
    fingerprint = "wide"


class WrongTokenizer(ByteTokenizer):
    vocab_size = 100
    eos_id = 99
    fingerprint = "wrong"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "text" / name).write_text(text, encoding="utf-8")
    return tmp_path / "text"


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def prepare(folder: Path, cache_dir: Path, tokenizer: ByteTokenizer | None = None) -> TokenStore:
    return prepare_store(folder_or_file(folder), tokenizer or ByteTokenizer(), cache_dir)


def documents(store: TokenStore) -> dict[str, list[int]]:
    return {
        name: store.tokens[start:stop].tolist()
        for name, (start, stop) in zip(store.names, store.spans.tolist(), strict=True)
    }


def stores(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in cache_dir.iterdir() if path.name != "manifests")


@pytest.mark.parametrize(("tokenizer", "dtype"), [(ByteTokenizer(), "uint16"), (WideTokenizer(), "uint32")])
def test_store_holds_documents_each_with_its_end(
    folder: Path, cache_dir: Path, tokenizer: ByteTokenizer, dtype: str
) -> None:
    store = prepare(folder, cache_dir, tokenizer)
    assert documents(store) == {name: [*text.encode(), tokenizer.eos_id] for name, text in TEXTS.items()}
    assert store.tokens.dtype == np.dtype(dtype)
    assert isinstance(store.tokens, np.memmap)
    assert not store.tokens.flags.writeable


def test_made_once_then_only_mapped(folder: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(folder, cache_dir)

    def refuse(*arguments: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(cache, "hash_file", refuse)
    monkeypatch.setattr(cache, "read_documents", refuse)
    assert prepare(folder, cache_dir).folder == first.folder
    opened = open_store(folder_or_file(folder), ByteTokenizer(), cache_dir)
    assert documents(opened) == documents(first)


def test_same_text_elsewhere_is_the_same_store(folder: Path, cache_dir: Path) -> None:
    first = prepare(folder, cache_dir)
    elsewhere = folder.rename(folder.parent / "moved")
    os.utime(elsewhere / "a.txt", (0, 0))
    assert prepare(elsewhere, cache_dir).folder == first.folder


@pytest.mark.parametrize("change", ["content", "name", "new", "gone", "tokenizer"])
def test_any_change_makes_a_new_store_and_leaves_the_old(folder: Path, cache_dir: Path, change: str) -> None:
    before = prepare(folder, cache_dir)
    old = documents(before)
    if change == "content":
        (folder / "a.txt").write_text("First")
        os.utime(folder / "a.txt", ns=(1, 1))  # same size: only hash and date tell
    elif change == "name":
        (folder / "a.txt").rename(folder / "z.txt")
    elif change == "new":
        (folder / "d.txt").write_text("fourth")
    elif change == "gone":
        (folder / "a.txt").unlink()
    after = prepare(folder, cache_dir, WideTokenizer() if change == "tokenizer" else None)
    assert after.folder != before.folder
    assert documents(after) != old == documents(TokenStore(before.folder))


def test_opening_what_was_not_prepared_is_refused(folder: Path, cache_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist: call prepare_data\(\) first"):
        open_store(folder_or_file(folder), ByteTokenizer(), cache_dir)
    assert not cache_dir.exists()


def test_failure_leaves_nothing_behind(folder: Path, cache_dir: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer wrong gave ids from 99 to 116, but its vocab_size is 100"):
        prepare(folder, cache_dir, WrongTokenizer())
    assert stores(cache_dir) == []


def test_a_corpus_of_no_documents_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="hold no documents"):
        prepare_store(folder_or_file(tmp_path / "empty.jsonl"), ByteTokenizer(), cache_dir)


def test_a_truncated_file_is_noticed(folder: Path, cache_dir: Path) -> None:
    store = prepare(folder, cache_dir)
    with (store.folder / "tokens.bin").open("r+b") as file:
        file.truncate(4)
    with pytest.raises(ValueError, match=r"has 4 bytes instead of \d+: delete"):
        open_store(folder_or_file(folder), ByteTokenizer(), cache_dir)


def test_several_writers_at_once_agree(folder: Path, cache_dir: Path) -> None:
    all_are_writing = Barrier(4)

    class Waiting(ByteTokenizer):
        def encode(self, text: str) -> Any:
            all_are_writing.wait(timeout=30)
            return super().encode(text)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: prepare(folder, cache_dir, Waiting()), range(4)))
    assert len({store.folder for store in found}) == len(stores(cache_dir)) == 1
    assert all(documents(store) == documents(found[0]) for store in found)


def test_a_store_pickles_as_its_folder(folder: Path, cache_dir: Path) -> None:
    store = prepare(folder, cache_dir)
    pickled = pickle.dumps(store)
    assert len(pickled) < 500
    assert documents(pickle.loads(pickled)) == documents(store)


def test_cache_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / "lightning_longctx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_cache_dir() == tmp_path / "home" / ".cache" / "lightning_longctx"


def test_encoding_may_give_any_integers(folder: Path, cache_dir: Path) -> None:
    class Listed(ByteTokenizer):
        fingerprint = "listed"

        def encode(self, text: str) -> Any:
            return list(text.encode())

    assert documents(prepare(folder, cache_dir, Listed())) == documents(prepare(folder, cache_dir))
