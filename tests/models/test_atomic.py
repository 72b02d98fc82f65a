"""A writer is killed before every single thing it does to the file system: what is there is whole, old or new."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.models import atomic
from lightning_longctx.models.atomic import DRAFTS, Draft, found, remove, sweep, written

CALLS = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "open")


def killed_at(count: int, act: Callable[[], None]) -> bool:
    """Whether a process that does ``act`` was killed before call number ``count`` to the system."""
    if not (child := os.fork()):
        left = [count]

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return call(*args, **kwargs)

            return wrapper

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        atomic.exchange = counted(atomic.exchange)
        act()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def write(path: Path, text: str, folder: bool) -> None:
    with written(path, folder=folder) as partial:
        for place in (partial / "a", partial / "b") if folder else (partial,):
            place.write_text(text)


def read(path: Path) -> str | None:
    """The text at a path; fails if it is not whole."""
    if not path.exists():
        return None
    places = [path / "a", path / "b"] if path.is_dir() else [path]
    (text,) = {place.read_text() for place in places}
    return text


@pytest.fixture(params=[True, False], ids=["exchange", "rename"])
def exchanges(request: Any, monkeypatch: Any) -> bool:
    """Whether the file system can exchange two names."""
    if not request.param:
        monkeypatch.setattr(atomic, "exchange", lambda one, other: False)
    return request.param


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("before", [None, "folder", "file"])
def test_a_killed_writer_leaves_the_old_or_the_new(
    tmp_path: Path, exchanges: bool, folder: bool, before: str | None
) -> None:
    count, seen = 0, set()
    while True:
        path = tmp_path / f"{count}" / "last.ckpt"
        path.parent.mkdir()
        if before is not None:
            write(path, "old", folder=before == "folder")
        killed = killed_at(count, lambda path=path: write(path, "new", folder))
        if exchanges:
            assert read(path) in ("new", None if before is None else "old")
        # Lightning looks for `last` checkpoints by how names begin and end.
        names = [entry.name for entry in path.parent.iterdir() if entry.name != DRAFTS]
        assert all(name.startswith("last") and name.endswith(".ckpt") for name in names)
        text = read(found(path.parent / (names or ["last.ckpt"])[0]))
        seen.add(text)
        assert text in ("new", None if before is None else "old")
        write(path.with_name("other.ckpt"), "newer", folder)
        assert sorted(entry.name for entry in path.parent.iterdir()) == (["last.ckpt"] if text else []) + ["other.ckpt"]
        if not killed:
            break
        count += 1
    assert count >= 5 and seen == {None if before is None else "old", "new"}


def test_a_killed_removal_leaves_all_or_nothing(tmp_path: Path) -> None:
    count, path = 0, tmp_path / "last.ckpt"
    while True:
        write(path, "old", folder=True)
        killed = killed_at(count, lambda: remove(path))
        assert read(path) in ("old", None)
        count += 1
        if not killed:
            break
    assert count >= 4 and not path.exists()
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_drafts_of_living_writers_stay(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "one.ckpt", folder=True)
    draft.begin()
    write(tmp_path / "two.ckpt", "two", folder=True)
    assert draft.partial.is_dir()
    for name in "ab":
        (draft.partial / name).write_text("one")
    draft.commit()
    assert (read(tmp_path / "one.ckpt"), read(tmp_path / "two.ckpt")) == ("one", "two")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one.ckpt", "two.ckpt"]


def test_an_error_leaves_the_old(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, "old", folder=True)
    with pytest.raises(ZeroDivisionError), written(path, folder=True):
        raise ZeroDivisionError
    assert read(path) == "old" and [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_link_is_replaced_and_not_what_it_names(tmp_path: Path, exchanges: bool) -> None:
    write(tmp_path / "best.ckpt", "best", folder=True)
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    write(tmp_path / "last.ckpt", "last", folder=True)
    assert (read(tmp_path / "best.ckpt"), read(tmp_path / "last.ckpt")) == ("best", "last")
    assert not (tmp_path / "last.ckpt").is_symlink()
    (tmp_path / "link.ckpt").symlink_to("best.ckpt")
    remove(tmp_path / "link.ckpt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="Linux only")
def test_this_system_exchanges_names(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("one")
    (tmp_path / "two").mkdir()
    assert atomic.exchange(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one").is_dir() and (tmp_path / "two").read_text() == "one"
    with pytest.raises(FileNotFoundError, match="three"):
        atomic.exchange(tmp_path / "one", tmp_path / "three")
