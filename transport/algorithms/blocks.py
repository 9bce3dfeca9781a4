# SPDX-License-Identifier: Apache-2.0
"""The block of a rank, for algorithms in which every rank gets the blocks of all and folds them by itself.

It is the rank's vector, if every rank gives one leaf. Else it has the sums of the rank's nodes, one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.algorithms.vector import Vector
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plans.plan import Operand, PlanBuilder
from sennit.transport.plans.tree import Span, balanced, combinations


class Blocks:
    """The blocks of an allreduce of `elements`, with what this rank gives in buffer 0."""

    def __init__(self, leaves: Leaves, *, rank: int, elements: int, dtype: Dtype, op: ReduceOp, result: int) -> None:
        self._leaves, self._rank, self._elements, self._dtype, self._op = leaves, rank, elements, dtype, op
        self._result, self._scratch = result, result + 1
        self._size_bytes = elements * dtype.item_bytes
        self._node_bytes = elements * (dtype if leaves.are_single else accumulator(dtype)).item_bytes
        self._nodes = [leaves.nodes(span) for span in leaves.of_rank]
        self.sizes = [len(nodes) * self._node_bytes for nodes in self._nodes]
        """By rank, in bytes."""
        self.is_given = leaves.are_single or leaves.partial
        """Whether buffer 0 is the block of this rank."""

    def cut(self, vector: Vector) -> None:
        """Takes the sizes of a vector that is one piece. If a post gives them, every rank gives one leaf."""
        if vector.is_counted:
            self._size_bytes = self._node_bytes = vector.size_bytes
            self.sizes = [vector.size_bytes] * len(self.sizes)

    def make(self, builder: PlanBuilder, offset: int) -> list[int]:
        """Puts the own block at `offset` of scratch. Returns the steps that do it."""
        if self.is_given or not self._elements:
            return [builder.copy(Operand(0), self._scratch, offset, self.sizes[self._rank])]
        low = self._leaves.of_rank[self._rank].low
        places = self._leaves.places(self._rank, self._dtype, self._elements, 0, 0)
        return [
            builder.reduce(
                places[node.low - low : node.high - low],
                self._scratch,
                offset + index * self._node_bytes,
                self._node_bytes,
                dtype=self._dtype,
                op=self._op,
                program=balanced(node.high - node.low),
                gives_partial=True,
            )
            for index, node in enumerate(self._nodes[self._rank])
        ]

    def fold(self, builder: PlanBuilder, starts: Sequence[Operand], after: Iterable[int]) -> None:
        """Folds the blocks of all ranks, which begin at `starts`, into the result."""
        nodes: list[Span] = []
        places: list[Operand] = []
        for start, own in zip(starts, self._nodes, strict=True):
            nodes += own
            for index in range(len(own)):
                offset = start.offset + index * self._node_bytes if index else start.offset
                places.append(Operand(start.index, offset, start.is_view, not self._leaves.are_single))
        builder.reduce(
            places,
            self._result,
            0,
            self._size_bytes,
            dtype=self._dtype,
            op=self._op,
            program=combinations(tuple(nodes), self._leaves.count),
            after=after,
        )
