"""Which files and documents make up a corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_longctx.data import Corpus, corpus, folder_or_file, standard_library
from lightning_longctx.data.corpus import read_documents


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_standard_library_is_long_sorted_and_has_no_foreign_files() -> None:
    found = standard_library()
    assert {"argparse.py", "asyncio/base_events.py", "json/decoder.py"} <= set(found.names)
    assert list(found.names) == sorted(found.names)
    assert not [name for name in found.names if {"site-packages", "test", "__pycache__"} & set(name.split("/"))]
    assert sum(found.path(name).stat().st_size for name in found.names) > 5_000_000


def test_an_interpreter_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"path=null .* no \.py files. Set path"):
        standard_library()


def test_folder_gives_text_files_in_order_and_skips_hidden_ones(tmp_path: Path) -> None:
    write(
        tmp_path,
        b_dot_md="b",
        sub__a_dot_txt="a",
        c_dot_PY="c",
        d_dot_png="d",
        _dot_git__e_dot_txt="e",
        _dot_f_dot_md="f",
    )
    found = folder_or_file(tmp_path)
    assert found == Corpus(tmp_path, ("b.md", "c.PY", "sub/a.txt"))
    assert [document for name in found.names for document in read_documents(found, name)] == [
        ("b.md", "b"),
        ("c.PY", "c"),
        ("sub/a.txt", "a"),
    ]


def test_jsonl_gives_a_document_a_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "één\nlong"}), "", json.dumps({"text": "two", "more": 1})]
    write(tmp_path, x_dot_jsonl="\n".join(lines))
    for path in (tmp_path, tmp_path / "x.jsonl"):
        found = folder_or_file(path)
        assert list(read_documents(found, "x.jsonl")) == [("x.jsonl:1", "één\nlong"), ("x.jsonl:3", "two")]


def test_line_ends_stay_and_wrong_bytes_become_visible(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\n\xff")
    assert list(read_documents(folder_or_file(tmp_path), "a.txt")) == [("a.txt", "a\r\n\ufffd")]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2: not JSON"), ("[1]", 'line 2: .*"text"'), ('{"text": 3}', 'line 2: .*"text"'), ("{}", '"text"')],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    write(tmp_path, x_dot_jsonl='{"text": ""}\n' + line)
    with pytest.raises(ValueError, match=message):
        list(read_documents(folder_or_file(tmp_path), "x.jsonl"))


def test_nothing_to_read_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path=.*has no text files: .*\.jsonl .*\.txt"):
        folder_or_file(tmp_path)
    with pytest.raises(ValueError, match=r"path=.*/absent does not exist"):
        folder_or_file(tmp_path / "absent")
    (tmp_path / "x.png").touch()
    with pytest.raises(ValueError, match=r"path=.*x\.png is no text file"):
        folder_or_file(tmp_path / "x.png")
