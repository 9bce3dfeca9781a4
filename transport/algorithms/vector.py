# SPDX-License-Identifier: Apache-2.0
"""The vector of an allreduce, reduce or broadcast, as algorithms cut it: into shares, and these into pieces.

Its size is known when the plan is compiled, or only when it is posted (`counted`). Then one plan serves many sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from sennit.transport.algorithms.ranges import ALIGNMENT_BYTES, Range, chunks, shares
from sennit.transport.light_tuple import LightTuple
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.plan import PlanBuilder
from sennit.transport.plans.vector_cut import VectorCut

# The piece of a vector that is not cut.
WHOLE: Final = 0


class Piece(LightTuple):
    """A range of a vector whose size is known when the plan is posted. It may then be empty, and nobody sends it."""

    offset: int
    size_bytes: int
    number: int
    partial_bytes: int
    """The bytes of the range's partial sums."""
    bytes_max: int


Cut: TypeAlias = Range | Piece


class Vector:
    """A vector, cut into `shares` nearly equal parts and these into pieces of at most `piece_bytes` (`WHOLE`: not cut).

    `elements`: its size, or with `counted` the most that it may have, where a post gives its size. An element of a
    partial sum has `partial_item_bytes`.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        *,
        elements: int,
        item_bytes: int,
        counted: bool,
        shares: int = 1,
        piece_bytes: int = WHOLE,
        partial_item_bytes: int = 0,
    ) -> None:
        self._builder, self._item_bytes = builder, item_bytes
        # A vector without elements has one size, so no count is needed.
        self.is_counted = counted and elements != 0
        self.shares: list[Sequence[Cut]]
        """The pieces of each share."""
        if counted:
            self._take(elements, shares, piece_bytes or max(elements, 1) * item_bytes)
        if self.is_counted:
            self._name_pieces(partial_item_bytes or item_bytes)
        else:
            self.shares = _cut(elements, item_bytes, shares, piece_bytes)

    def _take(self, elements: int, share_count: int, piece_bytes: int) -> None:
        line = max(ALIGNMENT_BYTES // self._item_bytes, 1)
        # No smaller vector has a larger share.
        share = min(-(-elements // line // share_count) * line, elements) if share_count > 1 else elements
        self._share_bytes = share * self._item_bytes
        self._cut = VectorCut(
            elements_max=elements,
            piece_bytes=piece_bytes,
            shares=share_count,
            pieces=max(-(-self._share_bytes // piece_bytes), 1),
        )
        numbers = range(share_count * self._cut.pieces)
        self._builder.take_vector(self._cut, [(number, self._item_bytes) for number in numbers], self._item_bytes)

    def _name_pieces(self, partial_item_bytes: int) -> None:
        cut, numbers = self._cut, range(self._cut.shares * self._cut.pieces)
        partials = 0
        if partial_item_bytes != self._item_bytes:
            partials = self._builder.add_counts([(number, partial_item_bytes) for number in numbers])
        pieces = []
        for number in numbers:
            left = self._share_bytes - number % cut.pieces * cut.piece_bytes
            partial = CountRange(partials + number, partials + number + 1)
            size_bytes = CountRange(number, number + 1)
            pieces.append(Piece(CountRange(0, number), size_bytes, number, partial, min(left, cut.piece_bytes)))
        self.shares = [pieces[first : first + cut.pieces] for first in range(0, len(pieces), cut.pieces)]

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole vector."""
        return CountRange(0, self._cut.shares * self._cut.pieces) if self.is_counted else self._end_of_last()

    def _end_of_last(self) -> int:
        last = self.shares[-1][-1]
        return last.offset + last.size_bytes


def _cut(elements: int, item_bytes: int, share_count: int, piece_bytes: int) -> list[Sequence[Cut]]:
    whole = [Range(0, elements * item_bytes)] if share_count == 1 else shares(elements, share_count, item_bytes)
    return [
        [Range(share.offset + piece.offset, piece.size_bytes) for piece in chunks(share.size_bytes, piece_bytes)]
        if piece_bytes
        else [share]
        for share in whole
    ]


def bytes_max(pieces: Iterable[Cut]) -> int:
    """The bytes of the largest piece."""
    return max(piece.bytes_max if isinstance(piece, Piece) else piece.size_bytes for piece in pieces)
