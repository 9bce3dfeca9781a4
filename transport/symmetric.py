# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory for NumPy: arrays that the other ranks of this host map (csrc/memory/shared_heap.hpp).

A transfer from or to such an array is one copy in place of two. A sum reads the peers' arrays where they are. Results
have the same bits as with other memory. It may be mixed with other memory, on any rank and in any call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sennit.transport import _core


class _Allocation:
    """Memory of the shared heap as NumPy sees it (the array interface). Freed with the last array that shows it."""

    def __init__(self, size_bytes: int) -> None:
        self._address = _core.symmetric_alloc(size_bytes)
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


def symmetric_empty(shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Returns an array of this shape, with any content. Raises MemoryError if the host has no memory for it.

    Allocating is slower than `numpy.empty`: make such arrays once and use them often.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    kind = np.dtype(dtype)
    count = math.prod(sizes)
    if count == 0:
        return np.empty(sizes, kind)
    return np.asarray(_Allocation(count * kind.itemsize)).view(kind).reshape(sizes)
