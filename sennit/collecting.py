# SPDX-License-Identifier: Apache-2.0
"""Loads modules without looks for garbage.

Python looks for garbage after every 700 new objects, and now and then at all that came since the last such look. What
modules make stays. But after `import torch` such a look takes 2 to 3 ms, a tenth of a group's start, and all ranks of a
host start at the same time (docs/lab/groups.md).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading(module: str) -> Iterator[None]:
    """A block that loads `module` and what it needs. Does nothing if it is loaded already.

    Behind it all objects of the process count as old ones, which only a full collection looks at. Where collections are
    off, or objects are frozen (`gc.freeze`), nothing of that changes.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            # All young objects join the old ones, unseen.
            gc.freeze()
            gc.unfreeze()
        gc.enable()
