# SPDX-License-Identifier: Apache-2.0
"""The fold by hosts: partial sums are made inside each host, and only these travel between hosts.

On every host one rank stands for the owner of a share (`Hosts.relay`). The ranks of the host send it their part of the
share. It folds them into the host's nodes of the tree (tree.py) and sends these to the owner. The owner folds the nodes
of all hosts. Results (allreduce) go back the same way. So a host of R ranks sends 1/R of what the direct fold sends to
other hosts, and all its ranks send at the same time (Cho et al., "BlueConnect: Decomposing all-reduce for deep learning
on heterogeneous network hierarchy", 2019).

Chunk `t` of share `j` has one number. It travels towards the owner as slot 2 * number and back as the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from sennit.transport.algorithms.fold import GATHER_LAG_CHUNKS, Fold
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES, Range
from sennit.transport.elements import Dtype, accumulator
from sennit.transport.hosts import Hosts
from sennit.transport.plan import Operand, PlanBuilder
from sennit.transport.tree import Span, combinations, cover

# Partial sums that a rank may have on their way to other hosts. It bounds the scratch memory.
RELAYED_CHUNKS: Final = 16


def host_chunk_bytes(hosts: Hosts, dtype: Dtype, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> int:
    """The bytes of elements whose partial sums, of all nodes of a host, fit one message of `chunk_bytes`."""
    widest = max(len(nodes) for nodes in _nodes_of(hosts))
    elements = max(chunk_bytes // (widest * accumulator(dtype).item_bytes), 1)
    return elements * dtype.item_bytes


def add_host_fold(builder: PlanBuilder, fold: Fold, hosts: Hosts) -> None:
    """Adds the whole schedule. For each pair of ranks, sends and receives come in the same order."""
    _Writer(builder, fold, hosts).write()


def _nodes_of(hosts: Hosts) -> list[list[Span]]:
    return [cover(span, hosts.world) for span in hosts.spans]


class _Writer:
    def __init__(self, builder: PlanBuilder, fold: Fold, hosts: Hosts) -> None:
        self._builder, self._fold, self._hosts = builder, fold, hosts
        self._rank, self._host = fold.rank, hosts.of_rank(fold.rank)
        self._here = hosts.spans[self._host]
        self._neighbours = [rank for rank in range(*self._here) if rank != self._rank]
        self._nodes = _nodes_of(hosts)
        self._item_bytes = fold.dtype.item_bytes
        self._partial_bytes = accumulator(fold.dtype).item_bytes
        self._first = [0]
        for share in fold.shares:
            self._first.append(self._first[-1] + len(share.chunks))
        # What may overwrite this rank's contribution to a chunk must wait for these steps, which read it.
        self._read: dict[int, list[int]] = {}
        # The step that made a chunk's result.
        self._made: dict[int, list[int]] = {}
        self._relayed: list[int] = []
        self._last_relay: dict[int, int] = {}
        largest = max(chunk.size_bytes for share in fold.shares for chunk in share.chunks)
        self._ring_bytes = largest // self._item_bytes * self._partial_bytes * len(self._nodes[self._host])
        relayed = sum(
            len(share.chunks)
            for owner, share in enumerate(fold.shares)
            if owner != self._rank and hosts.relay(self._host, owner) == self._rank
        )
        # The result is the last of the caller's buffers.
        self._scratch = fold.result_buffer + 1
        self._ring = builder.reserve_scratch(min(relayed, RELAYED_CHUNKS) * self._ring_bytes)

    def write(self) -> None:
        rounds = max(len(share.chunks) for share in self._fold.shares)
        for turn in range(rounds + (GATHER_LAG_CHUNKS if self._fold.gather else 0)):
            for owner, chunk, number in self._chunks(turn):
                self._reduce(owner, chunk, number)
            if self._fold.gather:
                for owner, chunk, number in self._chunks(turn - GATHER_LAG_CHUNKS):
                    self._gather(owner, chunk, number)

    def _chunks(self, turn: int) -> Iterator[tuple[int, Range, int]]:
        """The chunks of this turn with their owners and numbers. What other hosts wait for comes first."""
        count = len(self._hosts.spans)
        for step in range(1, count + 1):
            for owner in range(*self._hosts.spans[(self._host + step) % count]):
                chunks = self._fold.shares[owner].chunks
                if 0 <= turn < len(chunks):
                    yield owner, chunks[turn], self._first[owner] + turn

    def _reduce(self, owner: int, chunk: Range, number: int) -> None:
        relay = self._hosts.relay(self._host, owner)
        if relay != self._rank:
            source = self._fold.shares[owner].at(chunk)
            self._read[number] = [self._builder.send(relay, 2 * number, source, chunk.size_bytes)]
            return
        leaves = self._take(self._neighbours, number, chunk.size_bytes)
        leaves[self._rank] = self._fold.shares[owner].at(chunk)
        if owner == self._rank:
            self._fold_all(chunk, number, leaves)
        else:
            self._fold_here(owner, chunk, number, leaves)

    def _take(self, senders: Iterable[int], number: int, size_bytes: int) -> dict[int, Operand]:
        if not size_bytes:
            for sender in senders:
                self._builder.recv(sender, 2 * number, self._scratch, 0, 0)
            return {}
        loans = {sender: self._builder.loan(sender, 2 * number, size_bytes) for sender in senders}
        return {sender: Operand(loan, 0, is_view=True) for sender, loan in loans.items()}

    def _fold_here(self, owner: int, chunk: Range, number: int, leaves: dict[int, Operand]) -> None:
        """Folds the host's leaves into its nodes, which lie one after another in scratch, and sends them."""
        nodes = self._nodes[self._host]
        node_bytes = chunk.size_bytes // self._item_bytes * self._partial_bytes
        place = self._ring + len(self._relayed) % RELAYED_CHUNKS * self._ring_bytes
        # Messages to the owner must leave in the order in which it lends memory for them.
        after = {self._last_relay[owner]} if owner in self._last_relay else set()
        if len(self._relayed) >= RELAYED_CHUNKS:
            after.add(self._relayed[-RELAYED_CHUNKS])
        folds = [
            self._builder.reduce(
                [leaves[leaf] for leaf in range(*node)],
                self._scratch,
                place + index * node_bytes,
                node_bytes,
                dtype=self._fold.dtype,
                op=self._fold.op,
                gives_partial=True,
                after=after,
            )
            for index, node in enumerate(nodes if node_bytes else [])
        ]
        send = self._builder.send(
            owner, 2 * number, Operand(self._scratch, place), node_bytes * len(nodes), after=folds or after
        )
        self._read[number] = folds
        self._relayed.append(send)
        self._last_relay[owner] = folds[-1] if folds else send

    def _fold_all(self, chunk: Range, number: int, leaves: dict[int, Operand]) -> None:
        """Folds the host's leaves and the nodes of all other hosts into the result."""
        node_bytes = chunk.size_bytes // self._item_bytes * self._partial_bytes
        operands: list[Operand] = []
        nodes: list[Span] = []
        arrived = {}
        for host in self._other_hosts():
            size_bytes = node_bytes * len(self._nodes[host])
            arrived[host] = self._take([self._hosts.relay(host, self._rank)], number, size_bytes)
        if not chunk.size_bytes:
            self._made[number] = []
            return
        for host, listed in enumerate(self._nodes):
            if host == self._host:
                nodes += [Span(leaf, leaf + 1) for leaf in range(*self._here)]
                operands += [leaves[leaf] for leaf in range(*self._here)]
            else:
                nodes += listed
                (loan,) = arrived[host].values()
                operands += [
                    Operand(loan.index, index * node_bytes, is_view=True, is_partial=True)
                    for index in range(len(listed))
                ]
        result = self._fold.result_offsets[self._rank] + chunk.offset
        self._made[number] = [
            self._builder.reduce(
                operands,
                self._fold.result_buffer,
                result,
                chunk.size_bytes,
                dtype=self._fold.dtype,
                op=self._fold.op,
                program=combinations(nodes, self._fold.world),
            )
        ]

    def _other_hosts(self) -> Iterator[int]:
        """In the order in which they send to this one."""
        count = len(self._hosts.spans)
        return ((self._host - step) % count for step in range(1, count))

    def _gather(self, owner: int, chunk: Range, number: int) -> None:
        """Passes a result on: its owner to one rank of each host, this one to its neighbours."""
        relay = self._hosts.relay(self._host, owner)
        place = self._fold.result_offsets[owner] + chunk.offset
        if owner == self._rank:
            takers = [self._hosts.relay(host, owner) for host in self._other_hosts()]
            ready = self._made[number]
        else:
            takers = []
            giver = owner if relay == self._rank else relay
            # In place, the result overwrites the contribution.
            after = self._read[number] if self._fold.in_place else []
            ready = [
                self._builder.recv(
                    giver, 2 * number + 1, self._fold.result_buffer, place, chunk.size_bytes, after=after
                )
            ]
        if relay == self._rank:
            source = Operand(self._fold.result_buffer, place)
            for taker in [*takers, *self._neighbours]:
                self._builder.send(taker, 2 * number + 1, source, chunk.size_bytes, after=ready)
