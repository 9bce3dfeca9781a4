# SPDX-License-Identifier: Apache-2.0
"""What algorithms with a codec share: how they cut ranges of elements, and the scratch memory of a few chunks."""

from __future__ import annotations

from typing import Final

from sennit.transport.algorithms.ranges import Range
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.coding import Coding
from sennit.transport.plans.plan import MAX_LOAN_BYTES

# In float32 a chunk fills a quarter of a second-level cache, so that it is folded there after it is decoded.
DEFAULT_CHUNK_ELEMENTS: Final = 32_768
# How many chunks of each kind a rank works on at a time. It bounds the scratch memory.
CHUNKS_IN_WORK: Final = 4


def chunk_limit(coding: Coding, chunk_elements: int) -> int:
    """The most elements of a chunk: `chunk_elements`, less if a loan holds less, but at least a block."""
    if chunk_elements < 1:
        raise ArgumentError(f"chunk_elements {chunk_elements}; allowed: 1 or more")
    fitting = MAX_LOAN_BYTES // coding.coded_bytes(coding.unit)
    return max(min(chunk_elements // coding.unit, fitting), 1) * coding.unit


def cut(part: Range, most: int) -> list[Range]:
    """Chunks of `part`, all in elements. An empty part gives one empty chunk, because its message is sent."""
    if not part.size_bytes:
        return [Range(part.offset, 0)]
    end = part.offset + part.size_bytes
    return [Range(low, min(most, end - low)) for low in range(part.offset, end, most)]


class Ring:
    """Places in scratch that are used in turn, and the steps that must be done before the next use."""

    def __init__(self, offset: int, size_bytes: int, count: int) -> None:
        self._offset, self._size_bytes, self._count = offset, size_bytes, count
        self._users: list[list[int]] = [[] for _ in range(count)]
        self._next = 0

    def take(self) -> tuple[int, list[int], list[int]]:
        """Returns the offset of a place, the steps that used it last, and a list for those that use it now."""
        number = self._next % self._count
        self._next += 1
        before, self._users[number] = self._users[number], []
        return self._offset + number * self._size_bytes, before, self._users[number]
