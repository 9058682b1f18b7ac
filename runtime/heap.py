"""The C library's heap, told to keep what it has."""

from __future__ import annotations

import ctypes
import sys

# From glibc's malloc.h; the largest values that it takes.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
MOST_TRIM, MOST_MMAP = (1 << 31) - 1, 32 << 20


def keep_pages() -> None:
    """Keep freed memory for the next tensor.

    glibc returns the pages of large tensors to the kernel and takes them anew: for a rank, which makes the same
    tensors in every step, some 20,000 page faults a step. Where the C library is another one, nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(MMAP_THRESHOLD, MOST_MMAP)
        set_option(TRIM_THRESHOLD, MOST_TRIM)
