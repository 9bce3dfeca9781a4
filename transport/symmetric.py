# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory for NumPy: arrays that the other ranks of this host map (csrc/memory/shared_heap.hpp).

A transfer from or to such an array is one copy in place of two. A sum reads the peers' arrays where they are. Results
have the same bits as with other memory. It may be mixed with other memory, on any rank and in any call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sennit.transport import _core
from sennit.transport.errors import ArgumentError


class _Allocation:
    """Memory of the shared heap as NumPy sees it (the array interface). Freed with the last array that shows it."""

    def __init__(self, size_bytes: int) -> None:
        # The core takes 64 bits.
        self._address = _core.symmetric_alloc(size_bytes) if size_bytes < 1 << 64 else 0
        if self._address == 0:
            raise MemoryError(f"no shared memory left for {size_bytes} bytes")
        self.__array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self._address, False),
        }

    def __del__(self) -> None:
        if self._address:
            _core.symmetric_free(self._address)


def symmetric_empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Returns an array of this shape, with any content.

    Allocating is slower than `numpy.empty`: make such arrays once and use them often. Raises ArgumentError for a
    negative size or a type with Python objects, and MemoryError if the host has no memory for it.
    """
    sizes = tuple(operator.index(size) for size in (shape if isinstance(shape, Sequence) else (shape,)))
    kind = np.dtype(dtype)
    if min(sizes, default=0) < 0:
        raise ArgumentError(f"shape {sizes}; allowed: sizes of 0 or more")
    if kind.hasobject:
        raise ArgumentError(f"dtype {kind.str}; allowed: any without Python objects")
    size_bytes = math.prod(sizes) * kind.itemsize
    if size_bytes == 0:
        return np.empty(sizes, kind)
    memory = np.asarray(_Allocation(size_bytes))
    return np.ndarray(sizes, kind, buffer=memory.data)
