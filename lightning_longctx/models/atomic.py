"""Files and folders that are there whole or not at all, at whatever moment the process that writes them is killed.

What is being written lies in a hidden folder beside its place, where nobody looks for it, and comes to its place in one
rename. What a killed writer leaves there is removed by the next one: a lock says of a draft that its writer is alive.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, drafts of killed writers stay
    fcntl = None

DRAFTS = ".longctx-drafts"
"""Name of the hidden folder."""

REPLACED = ".longctx-replaced"
"""Where two paths cannot be exchanged: in the name of what is about to be replaced, before the suffix."""


class Draft:
    """What will be at a path. Only the process that calls ``begin`` calls ``commit`` or ``discard``; others may write.

    Args:
        path: Where it will be, in the place of what is there.
        folder: Whether it is a folder; else a file.
    """

    def __init__(self, path: Path, folder: bool) -> None:
        self.path = path.absolute()
        self.partial = self.path.parent / DRAFTS / f"{self.path.name}.partial"
        self._folder = folder
        self._lock: int | None = None

    def begin(self) -> None:
        """Make it, empty. Drafts of killed writers in the same folder go, and what they took away comes back."""
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        sweep(self.path.parent)
        _delete(self.partial)
        self.partial.parent.mkdir(exist_ok=True)
        if self._folder:
            self.partial.mkdir()
        else:
            self.partial.touch()
        self._lock = _locked(self.partial)

    def commit(self) -> None:
        """Put it in its place, for good: it is on the disk before it has its name."""
        synchronise(self.partial)
        replace(self.partial, self.path)
        self._end()

    def discard(self) -> None:
        """Forget it; what is in its place stays."""
        with suppress(OSError):  # such as what made it fail; the next writer removes it
            _delete(self.partial)
        self._end()

    def _end(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None
        _leave(self.partial.parent)


@contextmanager
def written(path: Path, folder: bool) -> Iterator[Path]:
    """Gives a place to write to, which has the name ``path`` once it is left without an error."""
    draft = Draft(path, folder)
    try:
        draft.begin()
        yield draft.partial
        draft.commit()
    except BaseException:
        draft.discard()
        raise


def remove(path: Path) -> None:
    """Remove a file or folder; half of it is never seen. Nothing happens if there is none."""
    path = path.absolute()
    if path.is_dir() and not path.is_symlink():
        gone = path.parent / DRAFTS / f"{path.name}.removed"
        gone.parent.mkdir(exist_ok=True)
        _delete(gone)
        path.rename(gone)
        _delete(gone)
        _leave(gone.parent)
    else:
        path.unlink(missing_ok=True)


def found(path: Path) -> Path:
    """Where the content of ``path`` is, after a writer may have been killed: that of ``path`` if it is there.

    Args:
        path: May be the name under which something waited to be replaced; then its proper name is meant.
    """
    path = _proper(path)
    if not os.path.lexists(path) and os.path.lexists(waiting := _waiting(path)):
        waiting.rename(path)
    return path


def sweep(folder: Path) -> None:
    """Remove what killed writers left in a folder. Drafts of living ones, in whatever process, stay."""
    drafts = folder / DRAFTS
    for draft in drafts.iterdir() if drafts.is_dir() else ():
        if _is_abandoned(draft):
            _delete(draft)
    for waiting in folder.glob(f"*{REPLACED}*"):
        proper = _proper(waiting)
        if proper != waiting and not (drafts / f"{proper.name}.partial").exists():
            found(waiting)
            _delete(waiting)
    _leave(drafts)


def replace(new: Path, path: Path) -> None:
    """Put ``new`` in the place of ``path``, in one step where the system can."""
    old = None
    if not os.path.lexists(path) or not (new.is_dir() or path.is_dir()):
        os.replace(new, path)
    elif exchange(new, path):
        old = new
    else:
        old = _waiting(path)
        _delete(old)
        path.rename(old)
        new.rename(path)
    _synchronise_entry(path.parent)
    if old is not None:
        _delete(old)


def holds_working_directory(path: Path) -> bool:
    """Whether a folder is the working directory or one around it, which must not be replaced: it would go away."""
    try:
        return Path.cwd().is_relative_to(os.path.realpath(path))
    except FileNotFoundError:  # it went away before
        return False


def exchange(one: Path, other: Path) -> bool:
    """Give two paths each other's content in one step (Linux, ``renameat2``).

    Returns:
        False where the system or the file system cannot; nothing has happened then.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    here, exchanged = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(here, os.fsencode(one), here, os.fsencode(other), exchanged) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def synchronise(path: Path) -> None:
    """Have a file, or a folder and all that is in it, on the disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            _synchronise_entry(Path(folder, name))
        _synchronise_entry(Path(folder))
    if path.is_file():
        _synchronise_entry(path)


def _synchronise_entry(path: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _waiting(path: Path) -> Path:
    # A visible name that keeps beginning and suffix: Lightning then finds it as a `last` checkpoint.
    return path.with_name(f"{path.stem}{REPLACED}{path.suffix}")


def _proper(path: Path) -> Path:
    return path.with_name(path.name.replace(REPLACED, ""))


def _locked(path: Path) -> int | None:
    """An open descriptor that holds a lock, or none where the file system knows no locks of folders."""
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_abandoned(draft: Path) -> bool:
    try:
        lock = _locked(draft)
    except FileNotFoundError:
        return False  # its writer has just finished
    if lock is not None:
        os.close(lock)
    return lock is not None


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):  # another process sweeps here too
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _leave(drafts: Path) -> None:
    with suppress(OSError):  # other drafts are in it, or another process has removed it
        drafts.rmdir()
