"""Freed memory is kept: what is as large again, of any size, is not mapped anew."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from partita.runtime.heap import keep_pages

keep_pages()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes, libc.free.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), (ctypes.c_void_p,)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    libc.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
print(first, faults())
"""


@pytest.mark.soak
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's heap")
def test_memory_that_is_made_again_is_not_mapped_again():
    """A block of 64 MiB, which glibc would otherwise return to the kernel."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    first, again = map(int, done.stdout.split())
    assert again < first / 4
    assert again < 16
