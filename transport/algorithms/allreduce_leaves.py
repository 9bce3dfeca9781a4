# SPDX-License-Identifier: Apache-2.0
"""Allreduce over leaves: the same bits in a world of any size (docs/reference/plans.md, "The tree").

A rank gives its span of V leaves. It folds them into the largest nodes of the tree inside its span and sends these
partial sums to the owner of each share of the vector, who folds all nodes and sends the result back to all. A rank's
nodes of one chunk travel as one message.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.transport.algorithms.fold import GATHER_LAG_CHUNKS
from sennit.transport.algorithms.ranges import (
    DEFAULT_CHUNK_BYTES,
    Range,
    check_chunk,
    chunks,
    peers_after,
    peers_before,
    shares,
)
from sennit.transport.elements import Dtype, ReduceOp, accumulator, check_reducible
from sennit.transport.plan import Operand, Plan, PlanBuilder
from sennit.transport.signature import Kind, signature
from sennit.transport.tree import Span, combinations, cover, leaves_of

OUTPUT = 1
SCRATCH = 2


def allreduce_leaves(
    *,
    world: int,
    rank: int,
    leaves: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Plan:
    """Buffers: `[input, output]`. The input holds the leaves `leaves_of(rank, world, leaves)`, one after another.

    A leaf and the output have `elements` of `dtype`. Raises ArgumentError if there are fewer leaves than ranks.
    """
    check_reducible(dtype, op)
    check_chunk(chunk_bytes)
    spans = [leaves_of(peer, world, leaves) for peer in range(world)]
    return _Writer(world, rank, leaves, elements, dtype, op, chunk_bytes, spans).write()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Elements [start, start + count) of the vector, as message `slot` of each pair of ranks."""

    start: int
    count: int
    slot: int


class _Writer:
    def __init__(
        self,
        world: int,
        rank: int,
        leaves: int,
        elements: int,
        dtype: Dtype,
        op: ReduceOp,
        chunk_bytes: int,
        spans: list[Span],
    ) -> None:
        self._world, self._rank, self._leaves = world, rank, leaves
        self._elements, self._dtype, self._op = elements, dtype, op
        self._span = spans[rank]
        self._nodes = [cover(span, leaves) for span in spans]
        self._item_bytes = dtype.item_bytes
        self._partial_bytes = accumulator(dtype).item_bytes
        self._chunks = [self._cut(part, chunk_bytes) for part in shares(elements, world, self._item_bytes)]
        self._builder = PlanBuilder(
            "allreduce of leaves",
            world=world,
            rank=rank,
            # Sizes of messages tell apart what the low bits do not.
            signature=signature(
                Kind.ALLREDUCE, type_code=dtype, op=op, root=1 + (leaves - 1) % 255, elements=elements * leaves
            ),
            buffer_bytes=[
                (self._span.high - self._span.low) * elements * self._item_bytes,
                elements * self._item_bytes,
            ],
            scratch_bytes=len(self._nodes[rank]) * elements * self._partial_bytes if world > 1 else 0,
            leaves=leaves,
        )
        # The last fold into scratch.
        self._folds: list[int] = []

    def _cut(self, share: Range, chunk_bytes: int) -> list[_Chunk]:
        """All of a rank's nodes of a chunk must fit one loan."""
        widest = max(len(nodes) for nodes in self._nodes)
        elements = max(chunk_bytes // (widest * self._partial_bytes), 1)
        start = share.offset // self._item_bytes
        return [
            _Chunk(start + part.offset, part.size_bytes, 2 * number)
            for number, part in enumerate(chunks(share.size_bytes // self._item_bytes, elements))
        ]

    def write(self) -> Plan:
        own = self._chunks[self._rank]
        rounds = max(len(listed) for listed in self._chunks)
        folded: list[int | None] = []
        for number in range(rounds + GATHER_LAG_CHUNKS):
            for peer in peers_after(self._rank, self._world):
                if number < len(self._chunks[peer]):
                    self._send_nodes(peer, self._chunks[peer][number])
            if number < len(own):
                folded.append(self._fold(own[number]))
            if number >= GATHER_LAG_CHUNKS:
                self._gather(number - GATHER_LAG_CHUNKS, folded)
        return self._builder.build()

    def _leaf(self, leaf: int, chunk: _Chunk) -> Operand:
        return Operand(0, ((leaf - self._span.low) * self._elements + chunk.start) * self._item_bytes)

    def _send_nodes(self, peer: int, chunk: _Chunk) -> None:
        """Folds the own leaves of a chunk into nodes, which lie one after another in scratch, and sends them."""
        nodes = self._nodes[self._rank]
        node_bytes = chunk.count * self._partial_bytes
        base = chunk.start * self._partial_bytes * len(nodes)
        for index, node in enumerate(nodes if chunk.count else []):
            # One after another: messages must leave in the order in which their receivers lend memory for them.
            self._folds = [
                self._builder.reduce(
                    [self._leaf(leaf, chunk) for leaf in range(*node)],
                    SCRATCH,
                    base + index * node_bytes,
                    node_bytes,
                    dtype=self._dtype,
                    op=self._op,
                    gives_partial=True,
                    after=self._folds,
                )
            ]
        self._builder.send(peer, chunk.slot, Operand(SCRATCH, base), node_bytes * len(nodes), after=self._folds)

    def _fold(self, chunk: _Chunk) -> int | None:
        """Receives the nodes of all ranks for a chunk of the own share, and folds them with the own leaves."""
        if not chunk.count:
            for peer in peers_before(self._rank, self._world):
                self._builder.recv(peer, chunk.slot, OUTPUT, 0, 0)
            return None
        node_bytes = chunk.count * self._partial_bytes
        loans = {
            peer: self._builder.loan(peer, chunk.slot, node_bytes * len(self._nodes[peer]))
            for peer in peers_before(self._rank, self._world)
        }
        operands: list[Operand] = []
        nodes: list[Span] = []
        for peer in range(self._world):
            if peer == self._rank:
                nodes += [Span(leaf, leaf + 1) for leaf in range(*self._span)]
                operands += [self._leaf(leaf, chunk) for leaf in range(*self._span)]
            else:
                nodes += self._nodes[peer]
                operands += [
                    Operand(loans[peer], index * node_bytes, is_view=True, is_partial=True)
                    for index in range(len(self._nodes[peer]))
                ]
        return self._builder.reduce(
            operands,
            OUTPUT,
            chunk.start * self._item_bytes,
            chunk.count * self._item_bytes,
            dtype=self._dtype,
            op=self._op,
            program=combinations(nodes, self._leaves),
        )

    def _gather(self, number: int, folded: list[int | None]) -> None:
        """Sends the own share's folded chunk to all and receives those of the others."""
        own = self._chunks[self._rank]
        if number < len(own):
            chunk, ready = own[number], folded[number]
            source = Operand(OUTPUT, chunk.start * self._item_bytes)
            after = () if ready is None else (ready,)
            for peer in peers_after(self._rank, self._world):
                self._builder.send(peer, chunk.slot + 1, source, chunk.count * self._item_bytes, after=after)
        for peer in peers_before(self._rank, self._world):
            if number < len(self._chunks[peer]):
                chunk = self._chunks[peer][number]
                offset = chunk.start * self._item_bytes
                self._builder.recv(peer, chunk.slot + 1, OUTPUT, offset, chunk.count * self._item_bytes)
