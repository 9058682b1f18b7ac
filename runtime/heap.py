"""Makes the C library's heap keep freed memory."""

from __future__ import annotations

import ctypes
import sys

# From glibc's malloc.h; the largest values it accepts.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
MOST_TRIM, MOST_MMAP = (1 << 31) - 1, 32 << 20


def keep_pages() -> None:
    """Keep freed memory for the next tensor.

    By default glibc returns the pages of large tensors to the kernel and maps them again: some 20,000 page faults a
    step for a rank, which makes the same tensors in every step. Does nothing with another C library.
    """
    if not sys.platform.startswith("linux"):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(MMAP_THRESHOLD, MOST_MMAP)
        set_option(TRIM_THRESHOLD, MOST_TRIM)
