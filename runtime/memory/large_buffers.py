# SPDX-License-Identifier: Apache-2.0
"""Keeps the memory of large buffers in the process, for the next step.

glibc's malloc gives blocks of more than 32 MiB back to the kernel when they are freed. A step that writes such a buffer
then gets new pages each time: zeroed by the kernel, one fault for each. That took up to 40 % of a step
(docs/lab/planner.md).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Final

KEPT_BYTES: Final = 256 << 20
"""Blocks up to this size stay. Larger ones come from the kernel each time."""

# malloc.h of glibc.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_INT_MAX: Final = (1 << 31) - 1


@functools.cache
def keep_large_buffers() -> bool:
    """From now on freed memory stays with this process; all its threads share it. False if this is not glibc.

    The process then has the memory of its busiest moment, and more where blocks of glibc 2.36 do not fit again: ten
    times a block in the worst of our trials. `sennit train` calls it when its data are loaded.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    # A thread's own arena has heaps of 64 MiB at most, so larger blocks would not stay there.
    wanted = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, KEPT_BYTES), (_M_TRIM_THRESHOLD, _INT_MAX))
    return all([mallopt(what, value) for what, value in wanted])
