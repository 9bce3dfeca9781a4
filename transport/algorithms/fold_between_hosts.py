# SPDX-License-Identifier: Apache-2.0
"""The fold by hosts (fold.py) with a codec between hosts alone: inside a host nothing is coded.

On every host one rank stands for the owner of a share. It folds its host's leaves into the largest nodes inside their
span, and codes each node. A node for another host is a message of its own. A node of the owner's host is decoded again
at once. So the result is Q(fold(Q(node 0), Q(node 1), ...)), where the nodes are those of all hosts, and Q codes and
decodes. A reduce_scatter does not code its results.

The bits depend on the leaves, the codec and its seed, and on which leaves share a host. They depend neither on owners
nor on chunks. A node that begins with leaf l has the logical indices of l. So with one leaf on each host these are the
bits of allreduce_coded.py. PREMUL_SUM with a posted scalar is the exception, because here leaves are scaled first.

A single host codes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sennit.transport.algorithms.coded_parts import CHUNKS_IN_WORK, Ring
from sennit.transport.algorithms.fold import PARTIALS_SENT_MAX, Chunk, Fold, FoldWriter, Layout, Values, add_fold
from sennit.transport.plans.coding import Coding
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Operand, PlanBuilder
from sennit.transport.plans.tree import Span, combinations

# The type of partial sums and decoded numbers.
_SUM: Final = Dtype.F32
_SUM_BYTES: Final = Dtype.F32.item_bytes


class NodeLayout(Layout):
    """A `Layout` in which a message has what one node of its host is made of, on the owner's host, too."""

    def messages(self, rank: int, owner: int) -> dict[int, list[Span]]:
        return self.by_host_node(rank)


def add_fold_between_hosts(builder: PlanBuilder, fold: Fold, coding: Coding) -> None:
    """Adds the whole schedule. Chunks begin where blocks do, and `fold` has a `NodeLayout`."""
    if len(fold.layout.hosts.spans) == 1:
        add_fold(builder, fold)
    else:
        _Writer(builder, fold, coding).write()


@dataclass(slots=True)
class _Coded:
    """A coded range in scratch."""

    operand: Operand
    step: int
    users: list[int]
    """The steps that read it are to be added."""


class _Writer(FoldWriter):
    def __init__(self, builder: PlanBuilder, fold: Fold, coding: Coding) -> None:
        super().__init__(builder, fold)
        self._coding = coding
        most = max(self._count(chunk) for chunks in self._chunks for chunk in chunks)
        room, coded_room = -(-most * _SUM_BYTES // 64) * 64, -(-coding.coded_bytes(most) // 64) * 64
        self._nodes = [node for nodes in self._layout.host_nodes for node in nodes]
        self._room, gathers = room, fold.gather
        self._sums = self._reserve(CHUNKS_IN_WORK, room)
        self._codes = self._reserve(PARTIALS_SENT_MAX, coded_room)
        self._decoded = self._reserve(CHUNKS_IN_WORK, room * len(self._nodes))
        self._summed = self._reserve(CHUNKS_IN_WORK, room * gathers)
        self._results = self._reserve(CHUNKS_IN_WORK, coded_room * gathers)
        # By peer: the step that made the last coded message. The next one is made after it: so messages leave in list
        # order, which is the order in which peers take them (docs/reference/plans.md rule 4).
        self._last: dict[int, int] = {}
        # By chunk of the own share: its sum, the step that makes it, and its readers.
        self._folded: dict[int, tuple[Operand, int, list[int]]] = {}

    def _reserve(self, count: int, size_bytes: int) -> Ring:
        return Ring(self._builder.reserve_scratch(count * size_bytes), size_bytes, count)

    def _has_partials(self, host: int) -> bool:
        # Decoded nodes have rings of their own.
        return False

    def _count(self, chunk: Chunk) -> int:
        return chunk.range.size_bytes // self._item_bytes

    def _coded_bytes(self, chunk: Chunk) -> int:
        return self._coding.coded_bytes(self._count(chunk))

    def _pass_on(self, chunk: Chunk, here: Values) -> None:
        owner = chunk.owner
        self._read.setdefault(chunk.number, [])
        for message, node in enumerate(self._layout.host_nodes[self._host]):
            if not chunk.range.size_bytes:
                self._builder.send(owner, self._slot(chunk, message), Operand(self._scratch), 0)
                continue
            coded = self._code(chunk, node, here, [self._last[owner]] if owner in self._last else [])
            self._last[owner] = coded.step
            self._send_coded(owner, self._slot(chunk, message), chunk, coded)

    def _send_coded(self, peer: int, slot: int, chunk: Chunk, coded: _Coded) -> None:
        sent = self._builder.send(peer, slot, coded.operand, self._coded_bytes(chunk), after=[coded.step])
        coded.users.append(sent)

    def _code(self, chunk: Chunk, node: Span, here: Values, after: Sequence[int]) -> _Coded:
        """Codes a node of this host, folded from `here`."""
        elements, read = self._fold.elements, self._read.setdefault(chunk.number, [])
        inside = [here.operands[index] for index, part in enumerate(here.nodes) if node.low <= part.low < node.high]
        source = inside[0]
        # A node of one operand needs no sum, unless the operand must still be scaled.
        if len(inside) == 1 and (source.is_partial or self._fold.op is not ReduceOp.PREMUL_SUM):
            dtype = _SUM if source.is_partial else self._fold.dtype
            source = source._replace(is_partial=False)
            coded = self._encode(self._codes, chunk, source, dtype, node.low * elements, after)
            read.append(coded.step)
            return coded
        offset, before, users = self._sums.take()
        size_bytes = self._count(chunk) * _SUM_BYTES
        summed = self._reduce(here, node, self._scratch, offset, size_bytes, after=before)
        read.append(summed)
        source = Operand(self._scratch, offset)
        coded = self._encode(self._codes, chunk, source, _SUM, node.low * elements, [summed, *after])
        users.append(coded.step)
        return coded

    def _encode(
        self, ring: Ring, chunk: Chunk, source: Operand, dtype: Dtype, base: int, after: Sequence[int]
    ) -> _Coded:
        """`base`: the logical index of the first element of the whole vector."""
        place, before, users = ring.take()
        step = self._builder.encode(
            source,
            self._scratch,
            place,
            self._count(chunk) * dtype.item_bytes,
            dtype=dtype,
            coding=self._coding,
            first_index=base + chunk.offset // self._item_bytes,
            after=[*after, *before],
        )
        return _Coded(Operand(self._scratch, place), step, users)

    def _decode(
        self, chunk: Chunk, source: Operand, buffer: int, offset: int, dtype: Dtype, after: Sequence[int]
    ) -> int:
        size_bytes = self._count(chunk) * dtype.item_bytes
        return self._builder.decode(source, buffer, offset, size_bytes, dtype=dtype, coding=self._coding, after=after)

    def _fold_all(self, chunk: Chunk, here: Values) -> None:
        """Decodes the nodes of all hosts, and folds them."""
        offset, before, users = self._decoded.take()
        places = {node: offset + number * self._room for number, node in enumerate(self._nodes)}
        steps = []
        for node in self._layout.host_nodes[self._host] if chunk.range.size_bytes else []:
            coded = self._code(chunk, node, here, [])
            after = [coded.step, *before]
            steps.append(self._decode(chunk, coded.operand, self._scratch, places[node], _SUM, after))
            coded.users.append(steps[-1])
        for host in self._others(reverse=True):
            relay = self._hosts.relay(host, self._rank)
            for message, node in enumerate(self._layout.host_nodes[host]):
                slot = self._slot(chunk, message)
                if not chunk.range.size_bytes:
                    self._builder.recv(relay, slot, self._scratch, 0, 0)
                    continue
                loan = self._builder.loan(relay, slot, self._coded_bytes(chunk))
                view = Operand(loan, is_view=True)
                steps.append(self._decode(chunk, view, self._scratch, places[node], _SUM, before))
        self._made[chunk.number] = []
        if chunk.range.size_bytes:
            users.append(self._fold_nodes(chunk, [places[node] for node in self._nodes], steps))

    def _fold_nodes(self, chunk: Chunk, places: Sequence[int], after: Sequence[int]) -> int:
        fold, gathers = self._fold, self._fold.gather
        dtype = _SUM if gathers else fold.dtype
        operands = [Operand(self._scratch, place, is_partial=True) for place in places]
        offset, before, readers = self._summed.take() if gathers else (chunk.result, [], [])
        step = self._builder.reduce(
            operands,
            self._scratch if gathers else fold.result_buffer,
            offset,
            self._count(chunk) * dtype.item_bytes,
            dtype=dtype,
            op=fold.op,
            program=combinations(tuple(self._nodes), self._layout.count),
            after=[*after, *before],
        )
        self._folded[chunk.number] = Operand(self._scratch, offset), step, readers
        return step

    def _gather(self, chunk: Chunk) -> None:
        """Passes a result on: its owner coded to one rank of each host, this one as it is to its neighbours."""
        if not chunk.range.size_bytes or self._relay(chunk.owner) != self._rank:
            super()._gather(chunk)
            return
        fold, slot = self._fold, self._slot(chunk) + 1
        if chunk.owner == self._rank:
            coded = self._code_result(chunk)
            for peer in self._stand_ins(chunk):
                self._send_coded(peer, slot, chunk, coded)
            source, after = coded.operand, [coded.step]
        else:
            loan = self._builder.loan(chunk.owner, slot, self._coded_bytes(chunk))
            # In place, the result overwrites the contribution.
            source, after = Operand(loan, is_view=True), self._read[chunk.number] if fold.in_place else []
        made = self._decode(chunk, source, fold.result_buffer, chunk.result, fold.dtype, after)
        if chunk.owner == self._rank:
            coded.users.append(made)
        result = Operand(fold.result_buffer, chunk.result)
        for taker in reversed(self._neighbours):
            self._builder.send(taker, slot, result, chunk.range.size_bytes, after=[made])

    def _code_result(self, chunk: Chunk) -> _Coded:
        summed, fold, readers = self._folded.pop(chunk.number)
        peers = self._stand_ins(chunk)
        after = [fold, *(self._last[peer] for peer in peers if peer in self._last)]
        coded = self._encode(self._results, chunk, summed, _SUM, self._layout.count * self._fold.elements, after)
        self._last |= dict.fromkeys(peers, coded.step)
        readers.append(coded.step)
        return coded
