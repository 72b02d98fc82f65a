"""The resident set of this process: how much memory it holds, and how much it held at most."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def peak_growth(run: Callable[[], object]) -> int | None:
    """Run something and say how far the resident set rose above where it was.

    Linux keeps the highest resident set (``VmHWM``) of a process, and forgets it when asked. Freed memory that the
    allocator still holds is given back first, or it would be used again without being counted.

    Returns:
        Bytes, right to a few MB: the kernel counts pages in batches. None where the system keeps no such count.
    """
    if not reset_peak():
        run()
        return None
    before = resident_bytes()
    run()
    return max(0, peak_bytes() - before)


def reset_peak() -> bool:
    """Give freed memory back to the system and let the peak begin anew; False where the system cannot."""
    if sys.platform != "linux":
        return False
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)
    try:
        _RESET.write_text("5")
    except OSError:  # some containers forbid it
        return False
    return True


def resident_bytes() -> int:
    """What the process holds now; Linux only."""
    return _bytes("VmRSS")


def peak_bytes() -> int:
    """The most it has held since it started, or since ``reset_peak``; Linux only."""
    return _bytes("VmHWM")


def knows_peak() -> bool:
    """Whether this Linux says what a process held at most; some sandboxes do not."""
    return "VmHWM:" in _STATUS.read_text()


def _bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{_STATUS} has no line {field}.")
    return int(found[1]) * 1024
