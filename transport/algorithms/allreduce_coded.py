# SPDX-License-Identifier: Apache-2.0
"""Allreduce with a codec: fewer bytes a number, sums in float32.

The result is Q(fold(Q(leaf 0), Q(leaf 1), ...)). Q codes and decodes. It is applied to what stays on the rank, too. So
the bits depend on nothing but the leaves, the codec and its seed. Element i of leaf l has the logical index l ·
elements + i, and element i of the result has V · elements + i: no two roundings of a sum draw the same number, and
their errors do not add up.

As in the direct allreduce (allreduce.py), each share of the vector has an owner, who folds it. A rank with one leaf
codes each share once and sends that. A rank with several leaves codes and decodes them itself. It sends the sums of its
nodes (leaves.py), which are float32. The owner codes each result once and sends it to all.

Shares and chunks begin at the beginning of a block, so that chunks have the codes of the whole vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from sennit.transport.algorithms.coded_parts import (
    CHUNKS_IN_WORK,
    DEFAULT_CHUNK_ELEMENTS,
    Ring,
    chunk_limit,
    cut,
)
from sennit.transport.algorithms.fold import GATHER_LAG_CHUNKS
from sennit.transport.algorithms.leaves import Leaves, allreduce_builder
from sennit.transport.algorithms.ranges import Range, peers_after, peers_before
from sennit.transport.plans.coding import Coding
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Operand, Plan, PlanBuilder
from sennit.transport.plans.tree import balanced, combinations

# The type of partial sums and decoded numbers.
_SUM: Final = Dtype.F32
_SUM_BYTES: Final = Dtype.F32.item_bytes


def allreduce_coded(
    *,
    world: int,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    coding: Coding,
    in_place: bool = True,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    leaves: int | None = None,
) -> Plan:
    """Buffers: those of `allreduce_builder`. `dtype` is F32, F16 or BF16; the core refuses others.

    Chunks have at most `chunk_elements`, but at least a block. Raises ArgumentError if there are fewer leaves than
    ranks.
    """
    given = Leaves(world, leaves)
    builder, result = allreduce_builder(
        "coded allreduce", given, rank=rank, elements=elements, dtype=dtype, op=op, in_place=in_place, coding=coding
    )
    fold = CodedFold(
        rank=rank,
        leaves=given,
        elements=elements,
        shares=shares_of(elements, world, coding),
        dtype=dtype,
        op=op,
        coding=coding,
        result_buffer=result,
        chunk_elements=chunk_elements,
    )
    add_coded_fold(builder, fold)
    return builder.build()


def shares_of(elements: int, world: int, coding: Coding) -> list[Range]:
    """Nearly equal parts of a vector, in elements. Each begins at the beginning of a block."""
    unit = coding.unit
    units = -(-elements // unit)
    bounds = [min(units * part // world * unit, elements) for part in range(world + 1)]
    return [Range(low, high - low) for low, high in pairwise(bounds)]


@dataclass(frozen=True, kw_only=True)
class CodedFold:
    """A fold of vectors of `elements` that travel coded. Buffer 0 has what this rank gives."""

    rank: int
    leaves: Leaves
    elements: int
    shares: Sequence[Range]
    """Each owner's, in elements."""
    dtype: Dtype
    op: ReduceOp
    coding: Coding
    result_buffer: int
    """The last of the caller's buffers."""
    chunk_elements: int


def add_coded_fold(builder: PlanBuilder, fold: CodedFold) -> None:
    """Adds the whole schedule."""
    _Writer(builder, fold).write()


class _Writer:
    def __init__(self, builder: PlanBuilder, fold: CodedFold) -> None:
        self._builder, self._leaves, self._rank, self._elements = builder, fold.leaves, fold.rank, fold.elements
        self._world, self._dtype, self._op, self._coding = fold.leaves.world, fold.dtype, fold.op, fold.coding
        self._result, self._scratch = fold.result_buffer, fold.result_buffer + 1
        rank, world = self._rank, self._world
        most = chunk_limit(fold.coding, fold.chunk_elements)
        self._shares = fold.shares
        self._chunks = [cut(share, most) for share in self._shares]
        # No chunk is larger.
        self._most = min(most, max(share.size_bytes for share in self._shares))
        self._coded = self._ring(1, self._coded_room)
        self._nodes = [self._leaves.nodes(span) for span in self._leaves.of_rank]
        # One message leaves for each peer, and one stays on this rank.
        own = self._coded_room if self._is_leaf(rank) else len(self._nodes[rank]) * self._room
        self._out = {peer: self._ring(CHUNKS_IN_WORK, own) for peer in peers_after(rank, world)}
        # The steps that made the last message to each peer. The next one is made after them: so messages leave in list
        # order, which is the order in which peers take them (docs/reference/plans.md rule 4).
        self._made: dict[int, list[int]] = {peer: [] for peer in self._out}
        # By turn: the sum of the own share, the step that makes it, and its readers.
        self._folded: dict[int, tuple[Operand, int, list[int]]] = {}
        # What the ranks give to a chunk of the own share.
        self._places = [sum(map(len, self._nodes[:peer])) * self._room for peer in range(world + 1)]
        self._fold = self._ring(CHUNKS_IN_WORK, self._places[-1])
        self._summed = self._ring(CHUNKS_IN_WORK, self._room)
        self._results = self._ring(CHUNKS_IN_WORK, self._coded_room)
        # The leaves of a rank that has several.
        leaf_count = len(self._leaves.given(rank))
        self._decoded = self._ring(2, 0 if self._is_leaf(rank) else leaf_count * self._room)

    @property
    def _room(self) -> int:
        return -(-self._most * _SUM_BYTES // 64) * 64

    @property
    def _coded_room(self) -> int:
        return -(-self._coding.coded_bytes(self._most) // 64) * 64

    def _ring(self, count: int, size_bytes: int) -> Ring:
        return Ring(self._builder.reserve_scratch(count * size_bytes), size_bytes, count)

    def _is_leaf(self, rank: int) -> bool:
        return self._leaves.is_leaf(self._leaves.of_rank[rank])

    def write(self) -> None:
        turns = max(map(len, self._chunks))
        for turn in range(turns + GATHER_LAG_CHUNKS):
            for peer in peers_after(self._rank, self._world):
                if turn < len(self._chunks[peer]):
                    self._contribute(peer, turn)
            if turn < len(self._chunks[self._rank]):
                self._collect(turn)
            if turn >= GATHER_LAG_CHUNKS:
                self._gather(turn - GATHER_LAG_CHUNKS)

    def _contribute(self, owner: int, turn: int) -> None:
        chunk, last = self._chunks[owner][turn], self._made[owner]
        if not chunk.size_bytes:
            self._builder.send(owner, 2 * turn, Operand(self._scratch), 0, after=last)
            return
        offset, before, users = self._out[owner].take()
        if self._is_leaf(self._rank):
            made, size_bytes = [self._encode(0, chunk, offset, [*before, *last])], self._coded_bytes(chunk)
        else:
            made = self._sum_nodes(chunk, offset, [*before, *last])
            size_bytes = len(made) * chunk.size_bytes * _SUM_BYTES
        self._made[owner] = made
        users.append(self._builder.send(owner, 2 * turn, Operand(self._scratch, offset), size_bytes, after=made))

    def _coded_bytes(self, chunk: Range) -> int:
        return self._coding.coded_bytes(chunk.size_bytes)

    def _encode(self, row: int, chunk: Range, offset: int, after: Sequence[int]) -> int:
        """Codes a chunk of this rank's leaf number `row`."""
        leaf = self._leaves.of_rank[self._rank].low + row
        item_bytes = self._dtype.item_bytes
        return self._builder.encode(
            Operand(0, (row * self._elements + chunk.offset) * item_bytes),
            self._scratch,
            offset,
            chunk.size_bytes * item_bytes,
            dtype=self._dtype,
            coding=self._coding,
            first_index=leaf * self._elements + chunk.offset,
            after=after,
        )

    def _decode(self, source: Operand, offset: int, chunk: Range, after: Sequence[int]) -> int:
        return self._builder.decode(
            source,
            self._scratch,
            offset,
            chunk.size_bytes * _SUM_BYTES,
            dtype=_SUM,
            coding=self._coding,
            after=after,
        )

    def _recode(self, row: int, chunk: Range, offset: int, after: Sequence[int]) -> int:
        """Codes a chunk of a leaf, and decodes it at `offset` of scratch."""
        place, before, users = self._coded.take()
        coded = self._encode(row, chunk, place, before)
        users.append(self._decode(Operand(self._scratch, place), offset, chunk, [coded, *after]))
        return users[-1]

    def _sum_nodes(self, chunk: Range, offset: int, after: Sequence[int]) -> list[int]:
        """Puts the sums of this rank's nodes behind each other at `offset` of scratch."""
        start, before, users = self._decoded.take()
        span = self._leaves.of_rank[self._rank]
        leaves = [
            (
                Operand(self._scratch, start + row * self._room),
                self._recode(row, chunk, start + row * self._room, before),
            )
            for row in range(span.high - span.low)
        ]
        size_bytes = chunk.size_bytes * _SUM_BYTES
        for number, node in enumerate(self._nodes[self._rank]):
            own = leaves[node.low - span.low : node.high - span.low]
            users.append(
                self._builder.reduce(
                    [place for place, _ in own],
                    self._scratch,
                    offset + number * size_bytes,
                    size_bytes,
                    dtype=_SUM,
                    op=self._op,
                    program=balanced(len(own)),
                    gives_partial=True,
                    after=[*(step for _, step in own), *after],
                )
            )
        return list(users)

    def _collect(self, turn: int) -> None:
        """Folds a chunk of the own share."""
        chunk = self._chunks[self._rank][turn]
        if not chunk.size_bytes:
            for peer in peers_before(self._rank, self._world):
                self._builder.recv(peer, 2 * turn, self._scratch, 0, 0)
            return
        offset, before, users = self._fold.take()
        own_place, steps = offset + self._places[self._rank], list[int]()
        if self._is_leaf(self._rank):
            steps.append(self._recode(0, chunk, own_place, before))
        else:
            steps += self._sum_nodes(chunk, own_place, before)
        for peer in peers_before(self._rank, self._world):
            place = offset + self._places[peer]
            if self._is_leaf(peer):
                loan = self._builder.loan(peer, 2 * turn, self._coded_bytes(chunk))
                steps.append(self._decode(Operand(loan, 0, is_view=True), place, chunk, before))
            else:
                size_bytes = len(self._nodes[peer]) * chunk.size_bytes * _SUM_BYTES
                steps.append(self._builder.recv(peer, 2 * turn, self._scratch, place, size_bytes, after=before))
        summed, free, readers = self._summed.take()
        fold = self._builder.reduce(
            self._give(chunk, offset),
            self._scratch,
            summed,
            chunk.size_bytes * _SUM_BYTES,
            dtype=_SUM,
            op=self._op,
            program=combinations(tuple(node for nodes in self._nodes for node in nodes), self._leaves.count),
            after=[*steps, *free],
        )
        users.append(fold)
        self._folded[turn] = Operand(self._scratch, summed), fold, readers

    def _give(self, chunk: Range, offset: int) -> list[Operand]:
        """Where the values of all nodes are, in the order of the tree."""
        return [
            Operand(
                self._scratch,
                offset + self._places[peer] + number * chunk.size_bytes * _SUM_BYTES,
                is_partial=not self._is_leaf(peer),
            )
            for peer in range(self._world)
            for number in range(len(self._nodes[peer]))
        ]

    def _decode_result(self, source: Operand, chunk: Range, after: Sequence[int]) -> int:
        item_bytes = self._dtype.item_bytes
        return self._builder.decode(
            source,
            self._result,
            chunk.offset * item_bytes,
            chunk.size_bytes * item_bytes,
            dtype=self._dtype,
            coding=self._coding,
            after=after,
        )

    def _gather(self, turn: int) -> None:
        """Codes the own result of a turn, sends it to all, and takes those of the others."""
        slot = 2 * turn + 1
        if turn < len(self._chunks[self._rank]):
            chunk = self._chunks[self._rank][turn]
            source, users = self._code_result(turn, chunk) if chunk.size_bytes else (Operand(self._scratch), [])
            for peer in peers_after(self._rank, self._world):
                sent = self._builder.send(peer, slot, source, self._coded_bytes(chunk), after=self._made[peer])
                users.append(sent)
        for peer in peers_before(self._rank, self._world):
            if turn >= len(self._chunks[peer]):
                continue
            chunk = self._chunks[peer][turn]
            if chunk.size_bytes:
                loan = self._builder.loan(peer, slot, self._coded_bytes(chunk))
                self._decode_result(Operand(loan, 0, is_view=True), chunk, [])
            else:
                self._builder.recv(peer, slot, self._scratch, 0, 0)

    def _code_result(self, turn: int, chunk: Range) -> tuple[Operand, list[int]]:
        """Returns the place of the code, and the list of the steps that read it."""
        summed, fold, readers = self._folded.pop(turn)
        place, before, users = self._results.take()
        coded = self._builder.encode(
            summed,
            self._scratch,
            place,
            chunk.size_bytes * _SUM_BYTES,
            dtype=_SUM,
            coding=self._coding,
            first_index=self._leaves.count * self._elements + chunk.offset,
            after=[fold, *before, *(step for made in self._made.values() for step in made)],
        )
        readers.append(coded)
        source = Operand(self._scratch, place)
        users += [coded, self._decode_result(source, chunk, [coded])]
        self._made = {peer: [coded] for peer in self._made}
        return source, users
