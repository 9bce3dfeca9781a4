# SPDX-License-Identifier: Apache-2.0
"""Halves what it costs to fork this process. The import does it: a fork server of Python imports, and calls nothing.

A fork copies page tables, and later each page that one of both writes to. A server that has imported torch has 290 MB
in 70,000 pages, and tests start thousands of ranks from it. In huge pages the memory has few page tables. Where the
kernel has none to give (`MADV_COLLAPSE` came with Linux 6.1), forks cost what they did.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Final

# linux/mman.h
MADV_COLLAPSE: Final = 25
HUGE_BYTES: Final = 2 << 20


def collapse() -> None:
    """Moves the private memory of this process that no file backs into huge pages."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, access, _, _, inode, *name = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and high - low >= HUGE_BYTES:
            libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), MADV_COLLAPSE)


gc.collect()
# Objects that a collector never looks at stay in pages that a fork never writes to.
gc.freeze()
collapse()
