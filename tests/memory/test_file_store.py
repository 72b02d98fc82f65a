"""What is on its way out, what a disk may do to it, and what is left of a store."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_longctx.memory.offloading.file_store import FileStore
from lightning_longctx.memory.offloading.host_store import HostStore
from lightning_longctx.memory.offloading.offload import open_store
from lightning_longctx.memory.resident import peak_growth
from tests.memory.later_copies import LaterCopies

CPU = torch.device("cpu")


class SlowDisk:
    """Writes when it is let."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()

    def __call__(self, descriptor: int, data: memoryview, start: int) -> int:
        self.began.set()
        assert self.go.wait(20)
        return os.pwrite(descriptor, data[:1000], start)  # and in small pieces


def test_put_returns_before_the_write_and_lets_two_go_ahead(tmp_path: Path) -> None:
    disk = SlowDisk()
    store = FileStore(tmp_path, disk)
    tensors = [torch.full((1024,), float(value)) for value in range(3)]
    places = [store.put(tensor) for tensor in tensors[:2]]
    assert disk.began.wait(20) and not disk.go.is_set()
    third = threading.Thread(target=lambda: places.append(store.put(tensors[2])))
    third.start()
    third.join(0.2)
    assert third.is_alive(), "a third tensor would wait in memory"
    disk.go.set()
    third.join(20)
    assert [float(place.get()[0]) for place in places] == [0, 1, 2]
    store.close()


def test_memory_is_free_as_soon_as_the_copy_is_done(tmp_path: Path) -> None:
    disk = SlowDisk()
    store = FileStore(tmp_path, disk)
    tensor = torch.zeros(1024)
    freed = weakref.ref(tensor.untyped_storage())
    place = store.put(tensor)
    del tensor
    assert freed() is not None
    disk.go.set()
    place.writing.wait()
    store.prefetch(place)  # any call of the thread that made it
    assert freed() is None
    copies = LaterCopies()
    host = HostStore(CPU, copies)
    places = [host.put(torch.zeros(1024)) for _ in range(5)]
    assert [place.departure.tensor is None for place in places] == [True] * 3 + [False] * 2
    assert copies.journal == [f"out {number}" for number in range(1, 6)]
    store.close()


def test_a_change_on_the_way_out_is_an_error_and_a_later_one_is_none(tmp_path: Path) -> None:
    disk = SlowDisk()
    file, host = FileStore(tmp_path, disk), HostStore(CPU, LaterCopies())
    for store in (file, host):
        tensor = torch.zeros(8)
        place = store.put(tensor)
        tensor.add_(1)
        disk.go.set()
        with pytest.raises(RuntimeError, match=r"shape \(8,\) was changed in place while it was copied out"):
            place.get()
    tensor = torch.zeros(8)
    place = file.put(tensor)
    place.writing.wait()
    tensor.add_(1)
    assert (place.get() == 0).all()
    file.close()


def full(descriptor: int, data: memoryview, start: int) -> int:
    if start:
        raise OSError(errno.ENOSPC, "No space left on device")
    return os.pwrite(descriptor, data, start)


def test_a_full_disk_is_an_error_of_the_next_put_and_of_get(tmp_path: Path) -> None:
    store = FileStore(tmp_path, full)
    good, bad = store.put(torch.ones(4)), store.put(torch.ones(4))
    with pytest.raises(OSError, match="could not be kept in a file in .*No space left.*Make room there") as caught:
        bad.get()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        store.put(torch.ones(4))
    assert (good.get() == 1).all()
    del bad, caught
    gc.collect()
    assert store.num_waiting == 0
    assert (store.put(torch.ones(4)).get() == 1).all()  # there is room again
    store.close()


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE")
def test_a_limit_of_the_system_is_heard(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = FileStore(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        place = store.put(torch.ones(1 << 16))
        with pytest.raises(OSError, match="File too large"):
            place.get()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.close()


def test_a_file_that_is_too_short_is_heard(tmp_path: Path) -> None:
    store = FileStore(tmp_path, write=lambda descriptor, data, start: len(data))
    with pytest.raises(OSError, match="ends 16 bytes early"):
        store.put(torch.ones(4)).get()
    store.close()


def test_a_missing_folder_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_store(CPU, tmp_path / "missing")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = FileStore(tmp_path)
    assert set(threading.enumerate()) <= before, "a thread before it is needed"
    place = store.put(torch.ones(4))
    assert list(tmp_path.iterdir()) == []
    del place, store  # without close
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    place = store.put(torch.ones(4))
    place.writing.wait()
    if (child := os.fork()) == 0:
        code = 1
        try:
            store.put(torch.ones(4))
        except RuntimeError as error:
            code = 0 if "forked from it" in str(error) else 2
        store.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (place.get() == 1).all()
    store.close()


def growth(offload: bool, num_tensors: int, num_elements: int) -> int | None:
    """By how much the resident set rises while tensors are kept for a backward."""
    store = FileStore()

    def keep(num_tensors: int) -> None:
        kept: list[Any] = []
        for value in range(num_tensors):
            tensor = torch.full((num_elements,), float(value))
            kept.append(store.put(tensor) if offload else tensor)
        del tensor
        for value in reversed(range(num_tensors)):
            back = kept.pop().get() if offload else kept.pop()
            if offload and kept:
                store.prefetch(kept[-1])
            assert back[0] == back[-1] == value

    keep(2)  # imports, and starts a thread
    found = peak_growth(partial(keep, num_tensors))
    store.close()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_falls() -> None:
    """In a process of its own, in which freed memory of this size goes back at once."""
    num_tensors, num_elements = 16, 1 << 21
    code = (
        "from tests.memory.test_file_store import growth\n"
        f"print(*(growth(offload, {num_tensors}, {num_elements}) for offload in (False, True)))"
    )
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if "None" in done.stdout:
        pytest.skip("this system keeps no peak that can be reset")
    plain, offloaded = (int(found) / 4 / num_elements for found in done.stdout.split())
    assert plain > num_tensors - 1
    assert offloaded < 6, (plain, offloaded)  # two on their way out, one new, two back, and some to count in pages
