# SPDX-License-Identifier: Apache-2.0
"""The fold: each rank sends every share of a vector to the share's owner, who folds it over the tree (tree.py).

Allreduce, reduce_scatter and reduce use it. The unit is a chunk. Among ranks of one host this is the direct algorithm:
each contribution goes straight to the owner. With several hosts it is hierarchical: on every host one rank stands for
the owner (`Hosts.relay`). The ranks of the host send it their part. It folds them into the host's nodes of the tree,
and sends these to the owner, who folds the nodes of all hosts. So a host of R ranks sends 1/R of what the direct fold
sends to other hosts, and all its ranks send at the same time (Cho et al., "BlueConnect: Decomposing all-reduce for deep
learning on heterogeneous network hierarchy", 2019). Results (allreduce) go back the same way.

A rank with several leaves folds them into its nodes before it sends them, or its caller has done that. A rank with one
leaf sends the elements themselves, and a rank with several leaves sends partial sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.algorithms.vector import Cut, Piece, bytes_max
from sennit.transport.light_tuple import LightTuple
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype, ReduceOp, accumulator
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Operand, PlanBuilder
from sennit.transport.plans.tree import Span, combinations
from sennit.transport.plans.vector_cut import LINE_BYTES, lines

# A folded chunk is sent this many chunks behind the contributions. By then its fold is done, so a rank, which runs
# ready steps in list order, keeps sending contributions while it folds.
GATHER_LAG_CHUNKS: Final = 2
# How many messages of partial sums a rank may have on their way. It bounds the scratch memory.
PARTIALS_SENT_MAX: Final = 16


class Share(LightTuple):
    """One owner's part: the position of each rank's contribution, and the chunks into which it is cut."""

    buffer: int
    offset: int
    chunks: Sequence[Cut]


class Layout(Leaves):
    """Which leaves a message holds."""

    def __init__(self, hosts: Hosts, count: int | None = None, *, partial: bool = False) -> None:
        super().__init__(hosts.world, count, partial=partial)
        self.hosts = hosts
        self.of_host = [self.of_ranks(*span) for span in hosts.spans]
        self.host_nodes = [self.nodes(span) for span in self.of_host]
        self.rank_nodes = [self.nodes(span) for span in self.of_rank]
        self.messages_max = max(map(len, self.host_nodes))

    def messages(self, rank: int, owner: int) -> dict[int, list[Span]]:
        """The nodes in each message of a rank to the one that stands for the owner on its host.

        One step reads a whole message. So each node of a host that is not the owner's has its own message.
        """
        host = self.hosts.of_rank(rank)
        if self.hosts.of_rank(owner) == host:
            return {0: self.rank_nodes[rank]}
        return self.by_host_node(rank)

    def by_host_node(self, rank: int) -> dict[int, list[Span]]:
        """A rank's nodes, by the number of the node of its host that they are in."""
        parts = {
            number: [node for node in self.rank_nodes[rank] if whole.low <= node.low < whole.high]
            for number, whole in enumerate(self.host_nodes[self.hosts.of_rank(rank)])
        }
        return {number: nodes for number, nodes in parts.items() if nodes}

    def chunk_bytes(self, dtype: Dtype, message_bytes: int) -> int:
        """The bytes of elements for which no message is larger than `message_bytes`."""
        messages = list(zip(self.of_rank, self.rank_nodes, strict=True))
        if len(self.hosts.spans) > 1:
            messages += zip(self.of_host, self.host_nodes, strict=True)
        widest = max((len(nodes) for span, nodes in messages if not self.is_leaf(span)), default=0)
        if not widest:
            return message_bytes
        return max(message_bytes // (widest * accumulator(dtype).item_bytes), 1) * dtype.item_bytes


class Fold(LightTuple):
    """The input of the fold, and the place of its results: share j's result goes to `result_offsets[j]` of
    `result_buffer`, the last of the caller's buffers.
    """

    rank: int
    dtype: Dtype
    op: ReduceOp
    layout: Layout
    shares: Sequence[Share]
    result_buffer: int
    result_offsets: Sequence[int]
    gather: bool
    """Whether every rank gets every share's result (allreduce)."""
    in_place: bool
    """Whether results overwrite contributions that may not have been sent yet."""
    elements: int = 0
    """The elements of one leaf or node. Those of a rank follow one another in the buffer of its contribution."""


def add_fold(builder: PlanBuilder, fold: Fold) -> None:
    """Adds the whole schedule. For each pair of ranks, sends and receives come in the same order."""
    if fold.layout.count == 1 and not fold.layout.partial:
        _add_alone(builder, fold)
    else:
        FoldWriter(builder, fold).write()


def _add_alone(builder: PlanBuilder, fold: Fold) -> None:
    """With one leaf, the result is this leaf, scaled if the operation scales. Booleans become 0 or 1."""
    share, offset = fold.shares[0], fold.result_offsets[0]
    if fold.op is ReduceOp.PREMUL_SUM or fold.dtype is Dtype.BOOL:
        for chunk in share.chunks:
            source, place = Operand(share.buffer, at(share.offset, chunk.offset)), at(offset, chunk.offset)
            builder.reduce([source], fold.result_buffer, place, chunk.size_bytes, dtype=fold.dtype, op=fold.op)
    elif not fold.in_place:
        for chunk in share.chunks:
            source, place = Operand(share.buffer, at(share.offset, chunk.offset)), at(offset, chunk.offset)
            builder.copy(source, fold.result_buffer, place, chunk.size_bytes)


def at(start: int, offset: int) -> int:
    """`offset` from `start`. An offset that is a range of counts has no other start than 0."""
    return start + offset if start else offset


class Chunk(LightTuple):
    owner: int
    number: int
    """The chunk's number. It gives the slots of the chunk's messages."""
    range: Cut
    buffer: int
    """The buffer of this rank's contribution."""
    offset: int
    """The offset of the contribution in that buffer."""
    result: int
    """The offset of the result."""


class Values:
    """Values of nodes that follow one another, and where they are."""

    def __init__(self, nodes: Iterable[Span] = (), operands: Iterable[Operand] = ()) -> None:
        self.nodes, self.operands = list(nodes), list(operands)

    def add(self, others: Values) -> None:
        self.nodes += others.nodes
        self.operands += others.operands


class FoldWriter:
    def __init__(self, builder: PlanBuilder, fold: Fold) -> None:
        self._builder, self._fold, self._layout, self._rank = builder, fold, fold.layout, fold.rank
        self._hosts = fold.layout.hosts
        self._host = self._hosts.of_rank(fold.rank)
        low, high = self._hosts.spans[self._host]
        # In the order in which they send to this rank.
        self._neighbours = [low + (fold.rank - low - step) % (high - low) for step in range(1, high - low)]
        self._item_bytes = fold.dtype.item_bytes
        self._partial_bytes = accumulator(fold.dtype).item_bytes
        self._chunks = self._list_chunks()
        # By chunk: the steps that read this rank's contribution, and those that made the result.
        self._read: dict[int, list[int]] = {}
        self._made: dict[int, list[int]] = {}
        # The SEND steps of messages with partial sums, and for each rank the step that made the last one.
        self._partial_sends: list[int] = []
        self._last_fold: dict[int, int] = {}
        largest = bytes_max(chunk.range for chunks in self._chunks for chunk in chunks)
        widest = max(len(self._layout.host_nodes[self._host]), len(self._layout.rank_nodes[self._rank]))
        self._ring_bytes = largest // self._item_bytes * self._partial_bytes * widest
        if any(isinstance(chunk.range, Piece) for chunks in self._chunks for chunk in chunks):
            self._ring_bytes = -(-self._ring_bytes // LINE_BYTES) * LINE_BYTES
        self._ring = builder.reserve_scratch(min(self._count_partials(), PARTIALS_SENT_MAX) * self._ring_bytes)

    def _list_chunks(self) -> list[list[Chunk]]:
        """The chunks of every owner."""
        listed: list[list[Chunk]] = []
        number = 0
        for owner, (share, result) in enumerate(zip(self._fold.shares, self._fold.result_offsets, strict=True)):
            listed.append([])
            for part in share.chunks:
                chunk = Chunk(owner, number, part, share.buffer, at(share.offset, part.offset), at(result, part.offset))
                listed[owner].append(chunk)
                number += 1
        return listed

    def _count_partials(self) -> int:
        """The messages of partial sums that this rank sends."""
        count = 0
        for owner, chunks in enumerate(self._chunks):
            if self._relay(owner) != self._rank:
                messages = len(self._layout.messages(self._rank, owner))
                count += len(chunks) * (0 if self._layout.is_leaf(self._layout.of_rank[self._rank]) else messages)
            elif owner != self._rank:
                count += len(chunks) * self._has_partials(self._host)
        return count

    def _has_partials(self, host: int) -> bool:
        """Whether the host's ranks send other hosts partial sums."""
        return not self._layout.is_leaf(self._layout.of_host[host])

    def write(self) -> None:
        turns = max(map(len, self._chunks))
        for turn in range(turns + (GATHER_LAG_CHUNKS if self._fold.gather else 0)):
            for chunk in self._turn(turn):
                if self._relay(chunk.owner) == self._rank:
                    self._collect(chunk)
                else:
                    self._contribute(chunk)
            if self._fold.gather:
                for chunk in self._turn(turn - GATHER_LAG_CHUNKS):
                    self._gather(chunk)

    def _turn(self, turn: int) -> Iterator[Chunk]:
        """One chunk of every owner. What other hosts wait for comes first, and own chunks come last."""
        for host in self._others(reverse=False):
            yield from self._of_owners(self._hosts.spans[host], turn)
        here = self._hosts.spans[self._host]
        yield from self._of_owners(Span(self._rank + 1, here.high), turn)
        yield from self._of_owners(Span(here.low, self._rank + 1), turn)

    def _of_owners(self, owners: Span, turn: int) -> Iterator[Chunk]:
        return (self._chunks[owner][turn] for owner in range(*owners) if 0 <= turn < len(self._chunks[owner]))

    def _others(self, *, reverse: bool) -> Iterator[int]:
        """The other hosts, the next one first. Reversed: in the order in which they send to this one."""
        count = len(self._hosts.spans)
        return ((self._host + (-step if reverse else step)) % count for step in range(1, count))

    def _relay(self, owner: int) -> int:
        """The rank of this host that stands for the owner."""
        return self._hosts.relay(self._host, owner)

    def _slot(self, chunk: Chunk, message: int = 0) -> int:
        """The slot of a message to the owner. The result's slot is the next one."""
        return 2 * (chunk.number * self._layout.messages_max + message)

    def _node_bytes(self, chunk: Chunk) -> int:
        if isinstance(chunk.range, Piece):
            return chunk.range.partial_bytes
        return chunk.range.size_bytes // self._item_bytes * self._partial_bytes

    def _in_turn(self, chunk: Chunk, start: int, count: int) -> tuple[list[int], int]:
        """The beginnings of `count` nodes that lie one after another from `start`, and the bytes of all of them."""
        if not isinstance(chunk.range, Piece):
            node_bytes = self._node_bytes(chunk)
            return [start + index * node_bytes for index in range(count)], count * node_bytes
        if count == 1:
            return [start], chunk.range.partial_bytes
        counts = [lines(start), *[(chunk.range.number, self._partial_bytes)] * count]
        first = self._builder.add_counts(counts)
        offsets = [CountRange(first, first + 1 + index) for index in range(count)]
        return list(offsets), CountRange(first + 1, first + 1 + count)

    def _own(self, chunk: Chunk) -> Values:
        """The leaves or nodes that this rank gives."""
        fold = self._fold
        if self._layout.are_single:
            places = [Operand(chunk.buffer, chunk.offset)]
        else:
            start = chunk.offset // self._item_bytes
            places = self._layout.places(self._rank, fold.dtype, fold.elements, chunk.buffer, start)
        return Values(self._layout.given(self._rank), places)

    def _contribute(self, chunk: Chunk) -> None:
        """Sends this rank's leaves to the relay."""
        relay = self._relay(chunk.owner)
        values = self._own(chunk)
        self._read[chunk.number] = []
        for message, nodes in self._layout.messages(self._rank, chunk.owner).items():
            self._send(relay, chunk, message, self._layout.of_rank[self._rank], nodes, values)

    def _send(self, taker: int, chunk: Chunk, message: int, span: Span, nodes: list[Span], values: Values) -> None:
        """Sends `nodes` of `span`, folded from `values`: the element itself if the span is one leaf."""
        slot = self._slot(chunk, message)
        if self._layout.is_leaf(span):
            step = self._builder.send(taker, slot, values.operands[0], chunk.range.size_bytes)
            self._read.setdefault(chunk.number, []).append(step)
            return
        node_bytes = self._node_bytes(chunk)
        place = self._ring + len(self._partial_sends) % PARTIALS_SENT_MAX * self._ring_bytes
        # Messages must leave in the order in which their receiver lends memory for them.
        after = {self._last_fold[taker]} if taker in self._last_fold else set()
        if len(self._partial_sends) >= PARTIALS_SENT_MAX:
            after.add(self._partial_sends[-PARTIALS_SENT_MAX])
        steps: list[int] = []
        offsets, size_bytes = self._in_turn(chunk, place, len(nodes))
        for offset, node in zip(offsets, nodes if node_bytes else [], strict=False):
            steps.append(self._reduce(values, node, self._scratch, offset, node_bytes, after=after))
            after = {steps[-1]}
        source = Operand(self._scratch, offsets[0])
        sent = self._builder.send(taker, slot, source, size_bytes, after=steps or after)
        self._read.setdefault(chunk.number, []).extend(steps)
        self._partial_sends.append(sent)
        self._last_fold[taker] = steps[-1] if steps else sent

    @property
    def _scratch(self) -> int:
        return self._fold.result_buffer + 1

    def _reduce(
        self, values: Values, node: Span, buffer: int, offset: int, size_bytes: int, *, after: Iterable[int] = ()
    ) -> int:
        """Folds the values inside a node. Into scratch goes a partial sum."""
        inside = [index for index, part in enumerate(values.nodes) if node.low <= part.low < node.high]
        return self._builder.reduce(
            [values.operands[index] for index in inside],
            buffer,
            offset,
            size_bytes,
            dtype=self._fold.dtype,
            op=self._fold.op,
            program=combinations(tuple(values.nodes[index] for index in inside), self._layout.count),
            gives_partial=buffer == self._scratch,
            after=after,
        )

    def _collect(self, chunk: Chunk) -> None:
        """Receives the leaves of the host's ranks, and folds them with the own ones."""
        arrived = {
            rank: [
                self._receive(rank, self._slot(chunk, message), chunk, self._layout.of_rank[rank], nodes)
                for message, nodes in self._layout.messages(rank, chunk.owner).items()
            ]
            for rank in self._neighbours
        }
        values = Values()
        for rank in range(*self._hosts.spans[self._host]):
            for part in [self._own(chunk)] if rank == self._rank else arrived[rank]:
                values.add(part)
        if chunk.owner == self._rank:
            self._fold_all(chunk, values)
        else:
            self._pass_on(chunk, values)

    def _pass_on(self, chunk: Chunk, here: Values) -> None:
        """Sends the host's nodes to the owner."""
        span, nodes = self._layout.of_host[self._host], self._layout.host_nodes[self._host]
        self._send(chunk.owner, chunk, 0, span, nodes, here)

    def _receive(self, sender: int, slot: int, chunk: Chunk, span: Span, nodes: list[Span]) -> Values:
        if not chunk.range.size_bytes:
            self._builder.recv(sender, slot, self._fold.result_buffer, chunk.result, 0)
            return Values()
        if self._layout.is_leaf(span):
            loan = self._builder.loan(sender, slot, chunk.range.size_bytes)
            return Values([span], [Operand(loan, 0, is_view=True)])
        offsets, size_bytes = self._in_turn(chunk, 0, len(nodes))
        loan = self._builder.loan(sender, slot, size_bytes)
        return Values(nodes, [Operand(loan, offset, is_view=True, is_partial=True) for offset in offsets])

    def _fold_all(self, chunk: Chunk, here: Values) -> None:
        """Folds the host's leaves and the nodes of all other hosts into the result."""
        by_host = {self._host: here}
        for host in self._others(reverse=True):
            relay, span = self._hosts.relay(host, self._rank), self._layout.of_host[host]
            by_host[host] = self._receive(relay, self._slot(chunk), chunk, span, self._layout.host_nodes[host])
        values = Values()
        for host in range(len(self._hosts.spans)):
            values.add(by_host[host])
        whole = Span(0, self._layout.count)
        size_bytes = chunk.range.size_bytes
        self._made[chunk.number] = (
            [self._reduce(values, whole, self._fold.result_buffer, chunk.result, size_bytes)] if size_bytes else []
        )

    def _gather(self, chunk: Chunk) -> None:
        """Passes a result on: the owner sends it to one rank of each host, and that rank to its neighbours."""
        slot, size_bytes = self._slot(chunk) + 1, chunk.range.size_bytes
        takers = list(reversed(self._neighbours))
        if chunk.owner == self._rank:
            takers = [*self._stand_ins(chunk), *takers]
            ready = self._made[chunk.number]
        else:
            ready = [self._take_result(self._giver(chunk), chunk)]
        if self._relay(chunk.owner) == self._rank:
            source = Operand(self._fold.result_buffer, chunk.result)
            for taker in takers:
                self._builder.send(taker, slot, source, size_bytes, after=ready)

    def _stand_ins(self, chunk: Chunk) -> list[int]:
        """The ranks of other hosts that stand for the owner."""
        return [self._hosts.relay(host, chunk.owner) for host in self._others(reverse=False)]

    def _giver(self, chunk: Chunk) -> int:
        """The rank from which this one gets the result."""
        relay = self._relay(chunk.owner)
        return chunk.owner if relay == self._rank else relay

    def _take_result(self, giver: int, chunk: Chunk) -> int:
        # In place, the result overwrites the contribution.
        after = self._read[chunk.number] if self._fold.in_place else []
        size_bytes, slot = chunk.range.size_bytes, self._slot(chunk) + 1
        return self._builder.recv(giver, slot, self._fold.result_buffer, chunk.result, size_bytes, after=after)
