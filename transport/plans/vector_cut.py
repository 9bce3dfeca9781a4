# SPDX-License-Identifier: Apache-2.0
"""How the core cuts the vector of a post, so that one plan serves vectors of many sizes (docs/reference/plans.md).

The vector is cut into shares that begin on cache lines, and these into pieces of `piece_bytes`. The last pieces of each
share are short or empty. The counts that steps name (counts.py) are sizes of pieces, in elements of a given width, or
fixed: then they are the room before a piece.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from sennit.transport.errors import ArgumentError
from sennit.transport.light_tuple import LightTuple

LINE_BYTES: Final = 64
# How many bits of a count in the binary form are the width. The number of the piece is above.
WIDTH_BITS: Final = 8
# The count that fills up to a cache line.
FILL: Final = ((1 << 32 - WIDTH_BITS) - 1, 0)


def lines(size_bytes: int) -> tuple[int, int]:
    """The count that has this size for every vector. The size is whole cache lines."""
    return size_bytes // LINE_BYTES, 0


def share_bounds(elements: int, shares: int, item_bytes: int) -> list[int]:
    """Returns where `shares` nearly equal parts of a vector begin and the last ends, in elements.

    Each begins on a cache line, so some may be empty.
    """
    line = max(LINE_BYTES // item_bytes, 1)
    lines = -(-elements // line)
    return [min(lines * part // shares * line, elements) for part in range(shares + 1)]


class VectorCut(LightTuple):
    """A cut of vectors of 1 to `elements_max` elements; 0 if that is 0."""

    elements_max: int
    piece_bytes: int
    shares: int
    pieces: int
    """The number of pieces in each share."""
    counts: tuple[tuple[int, int], ...] = ()
    """By count: the number of a piece, and the bytes of an element there; or `FILL`, or `lines`."""

    def sizes(self, elements: int, item_bytes: int) -> list[int]:
        """The bytes of each count. Raises ArgumentError if the vector has too few elements, or too many."""
        low = min(self.elements_max, 1)
        if not low <= elements <= self.elements_max:
            raise ArgumentError(f"the vector has {elements} elements; allowed: {low}..{self.elements_max}")
        in_piece = self.piece_bytes // item_bytes
        of_pieces = [
            min(max(high - low - piece * in_piece, 0), in_piece)
            for low, high in pairwise(share_bounds(elements, self.shares, item_bytes))
            for piece in range(self.pieces)
        ]
        sizes: list[int] = []
        start = 0
        for count in self.counts:
            number, width = count
            fixed = -start % LINE_BYTES if count == FILL else number * LINE_BYTES
            sizes.append(of_pieces[number] * width if width else fixed)
            start += sizes[-1]
        return sizes
