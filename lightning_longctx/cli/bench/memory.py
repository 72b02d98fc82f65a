"""How much memory one call needs beyond what was there before it."""

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
    if not _reset_peak():
        run()
        return None
    before = _bytes("VmRSS")
    run()
    return max(0, _bytes("VmHWM") - before)


def _reset_peak() -> bool:
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


def _bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{_STATUS} has no line {field}.")
    return int(found[1]) * 1024
