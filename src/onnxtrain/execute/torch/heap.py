"""The heap of the process: memory that a step frees stays there for the next one.

glibc gives the top of its heap back to the kernel as soon as enough of it is free, which it is after every backward
pass; the next step then faults page after page in again. It does not where it is told so (``mallopt(3)``,
``M_TRIM_THRESHOLD``).
"""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_NEVER = -1
_LARGEST = 4 * 2**20 * ctypes.sizeof(ctypes.c_long)  # glibc's DEFAULT_MMAP_THRESHOLD_MAX, which its own rises to
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


@functools.cache
def keep_freed() -> bool:
    """Keep what is freed from now on, once for the process; whether it is kept.

    It is not where another C library is at work, or where variables of the environment have chosen thresholds.
    """
    if any(name in os.environ for name in _CHOSEN) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # either one ends that thresholds follow from what is freed, so both are stated
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _NEVER))


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # no POSIX, or another library, which does not know the name
        return False
