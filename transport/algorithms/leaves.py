# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a reduction give: a leaf each, several leaves of a larger tree, or the sums of their nodes.

Equal leaves give the same bits in a world of any size, whatever the algorithm: ranks pass on either one leaf, or the
partial sums of the largest nodes inside the span of leaves that they speak for (`tree.cover`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator, check_reducible
from sennit.transport.plans.plan import Operand, PlanBuilder
from sennit.transport.plans.signature import ROUND_TRIPS, Kind, coded, signature
from sennit.transport.plans.tree import Span, cover, given_spans, leaves_of

if TYPE_CHECKING:
    from sennit.transport.plans.coding import Coding


class Leaves:
    """`count` leaves that `world` ranks give in turn (`leaves_of`); by default one a rank.

    `partial`: the ranks give partial sums of their nodes (`cover`) in place of leaves. Raises ArgumentError if there
    are fewer leaves than ranks.
    """

    def __init__(self, world: int, count: int | None = None, *, partial: bool = False) -> None:
        self.world, self.partial, self.are_counted = world, partial, count is not None
        self.count = world if count is None else count
        # Refuses a wrong count now. The cost model asks for the spans of few of the leaves that it is given.
        leaves_of(0, world, self.count)

    @cached_property
    def of_rank(self) -> list[Span]:
        """Returns the span of each rank."""
        return [leaves_of(rank, self.world, self.count) for rank in range(self.world)]

    @property
    def are_single(self) -> bool:
        """Whether every rank gives one leaf, so that its vector is what it sends."""
        return self.count == self.world and not self.partial

    @property
    def are_equal_nodes(self) -> bool:
        """Whether the leaves of every rank are one node of the tree, and as many. Then the tree over ranks is what is
        above these nodes.
        """
        each = self.count // self.world
        return self.count % self.world == 0 and each & (each - 1) == 0

    def of_ranks(self, low: int, high: int) -> Span:
        """The leaves of ranks `low` up to, not including, `high`."""
        return Span(self.of_rank[low].low, self.of_rank[high - 1].high)

    def nodes(self, span: Span) -> list[Span]:
        """The largest nodes inside a span, whose sums stand for it."""
        return cover(span, self.count)

    def is_leaf(self, span: Span) -> bool:
        """Whether a message with this span holds the elements themselves."""
        return span.high - span.low == 1 and not self.partial

    def width(self, span: Span, partial_ratio: float = 1) -> float:
        """The size of a message with this span, in vectors. A partial sum is `partial_ratio` times as wide."""
        return 1 if self.is_leaf(span) else len(self.nodes(span)) * partial_ratio

    def of_node(self, low: int, level: int) -> Span:
        """The leaves of the 2**level ranks from `low` on; of fewer, if the world ends before."""
        return self.of_ranks(low, min(low + (1 << level), self.world))

    def widths(self, partial_ratio: float = 1) -> list[float]:
        """The size of the widest message of 2**level ranks, at each level below the root, in vectors."""
        levels = range((self.world - 1).bit_length())
        if self.are_single:
            return [partial_ratio if level else 1 for level in levels]
        return [
            max(self.width(self.of_node(low, level), partial_ratio) for low in range(0, self.world, 1 << level))
            for level in levels
        ]

    def item_bytes(self, dtype: Dtype) -> int:
        """The bytes of an element in the buffer that a rank gives."""
        return (accumulator(dtype) if self.partial else dtype).item_bytes

    def given(self, rank: int) -> list[Span]:
        """The rows of the buffer that `rank` gives."""
        return given_spans(rank, self.world, self.count, partial=self.partial)

    def places(self, rank: int, dtype: Dtype, elements: int, buffer: int, start: int) -> list[Operand]:
        """Where the elements from `start` on begin in each row of `elements`."""
        return [
            Operand(buffer, (row * elements + start) * self.item_bytes(dtype), is_partial=self.partial)
            for row in range(len(self.given(rank)))
        ]


def allreduce_builder(
    name: str,
    leaves: Leaves,
    *,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    in_place: bool,
    round_trips: bool = False,
    coding: Coding | None = None,
    counted: bool = False,
) -> tuple[PlanBuilder, int]:
    """Returns the builder of an allreduce, and the number of the buffer for its result.

    Buffers: `[data]` in place, else `[input, output]`; `elements` of `dtype` each. With leaves that were counted, the
    buffers are `[input, output]`, and the input holds the leaves of `leaves_of(rank, world, leaves)`, one after
    another; `partial`: the sums of their nodes, in the accumulator's type (`given_spans`). Raises ArgumentError if the
    operation is not defined for the type, if PREMUL_SUM is to scale partial sums, or if a vector whose size a post
    gives (`counted`) has other leaves than one a rank.
    """
    check_reducible(dtype, op)
    if counted and not leaves.are_single:
        raise ArgumentError(f"{leaves.count} leaves of {leaves.world} ranks with a counted size; allowed: one a rank")
    if leaves.partial and op is ReduceOp.PREMUL_SUM:
        raise ArgumentError("PREMUL_SUM of partial sums; allowed: SUM, of leaves that were scaled before")
    size_bytes = elements * dtype.item_bytes
    in_place = in_place and not leaves.are_counted
    given_bytes = len(leaves.given(rank)) * elements * leaves.item_bytes(dtype)
    # The field has the low bits of the number of leaves. Sizes of messages tell numbers with equal low bits apart.
    root = 1 + (leaves.count - 1) % 255 if leaves.are_counted else 0
    # The core itself fills in a size that the post gives.
    summed = 0 if counted else elements * leaves.count if leaves.are_counted else elements
    called = signature(Kind.ALLREDUCE, type_code=dtype, op=op, root=root, elements=summed) | round_trips * ROUND_TRIPS
    builder = PlanBuilder(
        name,
        world=leaves.world,
        rank=rank,
        signature=coded(called, coding, leaves.count, elements),
        buffer_bytes=[size_bytes] if in_place else [given_bytes, size_bytes],
        leaves=leaves.count,
    )
    return builder, 0 if in_place else 1
