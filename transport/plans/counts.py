# SPDX-License-Identifier: Apache-2.0
"""Counts at run time: sizes and offsets of a plan that are known only when it is posted (docs/reference/plans.md).

In a step, a `CountRange` stands for the bytes of a range of the post's counts. That is enough for parts that lie one
after another: the size of part k is the range [k, k + 1), and its offset is the range of all parts before it.
"""

from __future__ import annotations

from typing import Final, Self

from sennit.transport.errors import ArgumentError

COUNTED_BIT: Final = 1 << 63


class CountRange(int):
    """The bytes of `counts[first:end]`. As an int it is its own binary form."""

    def __new__(cls, first: int, end: int) -> Self:
        if not 0 <= first <= end < 1 << 31:
            raise ArgumentError(f"counts[{first}:{end}]; allowed: 0 <= first <= end < 2**31")
        return super().__new__(cls, COUNTED_BIT | end << 32 | first)

    @classmethod
    def decode(cls, number: int) -> int:
        """`number` of a plan's binary form: itself, or the range of counts that it stands for."""
        return cls(number & 0xFFFF_FFFF, number >> 32 & 0x7FFF_FFFF) if number & COUNTED_BIT else number

    @property
    def first(self) -> int:
        return int(self) & 0xFFFF_FFFF

    @property
    def end(self) -> int:
        return int(self) >> 32 & 0x7FFF_FFFF

    def describe(self) -> str:
        return f"counts[{self.first}:{self.end}]"

    def __repr__(self) -> str:
        return f"CountRange({self.first}, {self.end})"


def place_of(offset: CountRange, size_bytes: CountRange) -> CountRange:
    """The parts that begin at `offset`, as many as `size_bytes` has. A step that moves bytes there moves just these."""
    return CountRange(offset.end, offset.end + size_bytes.end - size_bytes.first)


def end_of(offset: int, size_bytes: int) -> int:
    """Where `size_bytes` from `offset` end."""
    if isinstance(offset, CountRange) and isinstance(size_bytes, CountRange):
        return CountRange(offset.first, place_of(offset, size_bytes).end)
    return size_bytes if isinstance(size_bytes, CountRange) else offset + size_bytes
