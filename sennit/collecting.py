# SPDX-License-Identifier: Apache-2.0
"""Loads modules without collections of garbage in between.

Python collects after every 700 new objects, and now and then looks at all that came since the last such look. To load
the modules of a group makes some thousand objects, none of them garbage. After `import torch` one look takes 2 to 3 ms,
a tenth of a group's start, and all ranks of a host start at the same time (docs/lab/groups.md).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Also a decorator. Nothing in it may wait. What it made is looked at by the next collection after it.

    Where collections are off already, they stay off. Blocks of several threads may overlap: the first that ends turns
    collections on again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
