# SPDX-License-Identifier: Apache-2.0
"""Alltoall and allgather with a codec, of counts at run time: senders code parts, receivers decode them.

A part that stays is coded, too. LOSSLESS copies it. Blocks begin where parts do. An allgather has the logical indices
of its result. In an alltoall, element i of what rank r gives has r · 2^40 + i, because what ranks give has no common
order.

Counts are bytes: of elements, then of codes (`_coded_sizes`), which lie in scratch one after another. Codes of LOSSLESS
have no fixed size. Their length is in front of them, and goes first, as a message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sennit.transport.algorithms.ranges import peers_after, peers_before
from sennit.transport.plans.coding import CodecKind, Coding
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.plan import LENGTH_BYTES, Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, coded, signature

# Ranks of an alltoall draw random numbers of their own.
RANK_SHIFT: Final = 40


def alltoall_counts(rank: int, sent: Sequence[int], received: Sequence[int], dtype: Dtype, coding: Coding) -> list[int]:
    """The counts of `alltoall_coded`, from the elements that go to each rank, and that come from each."""
    parts = [*sent, *received]
    first_index = rank << RANK_SHIFT
    return [*(count * dtype.item_bytes for count in (first_index, *parts)), *_coded_sizes(parts, dtype, coding)]


def allgather_counts(counts: Sequence[int], dtype: Dtype, coding: Coding) -> list[int]:
    """The counts of `allgather_coded`, from the elements that each rank gives."""
    return [*(count * dtype.item_bytes for count in counts), *_coded_sizes(counts, dtype, coding)]


def alltoall_coded(*, world: int, rank: int, dtype: Dtype, coding: Coding) -> Plan:
    """Buffers: `[input, output]`. Counts: `alltoall_counts`."""
    plan = Exchange(Kind.ALLTOALL, world, rank, dtype, coding, elements_at=1, parts=2 * world, output=1 + world)
    for peer in peers_after(rank, world):
        plan.send(peer, [peer], source=CountRange(1, 1 + peer), first_index=CountRange(0, 1 + peer))
    plan.keep(rank, world + rank, source=CountRange(1, 1 + rank), first_index=CountRange(0, 1 + rank))
    for peer in peers_before(rank, world):
        plan.receive(peer, world + peer)
    return plan.build()


def allgather_coded(*, world: int, rank: int, dtype: Dtype, coding: Coding) -> Plan:
    """Buffers: `[input, output]`. Counts: `allgather_counts`."""
    plan = Exchange(Kind.ALLGATHER, world, rank, dtype, coding, elements_at=0, parts=world, output=0)
    plan.send(rank, list(peers_after(rank, world)), source=0, first_index=CountRange(0, rank))
    plan.keep(rank, rank, source=0, first_index=CountRange(0, rank))
    for peer in peers_before(rank, world):
        plan.receive(peer, peer)
    return plan.build()


def _coded_sizes(parts: Sequence[int], dtype: Dtype, coding: Coding) -> list[int]:
    """For each part the most bytes of its codes; of LOSSLESS those of the length before them, too."""
    before = [LENGTH_BYTES] if coding.kind is CodecKind.LOSSLESS else []
    return [size for count in parts for size in (*before, coding.coded_bytes(count, dtype.item_bytes))]


class Exchange:
    """Writes the plan. Part k has the elements of count `elements_at` + k."""

    def __init__(
        self,
        kind: Kind,
        world: int,
        rank: int,
        dtype: Dtype,
        coding: Coding,
        *,
        elements_at: int,
        parts: int,
        output: int,
    ) -> None:
        """Counts before the first part: `elements_at`; before the first one of the output: `output`."""
        self._dtype, self._coding, self._scratch = dtype, coding, 2
        self._elements_at, self._output = elements_at, output
        self._codes_at, self._is_exact = elements_at + parts, coding.kind is CodecKind.LOSSLESS
        gathers = kind is Kind.ALLGATHER
        given = CountRange(rank, rank + 1) if gathers else CountRange(elements_at, elements_at + world)
        count_count = elements_at + parts * (3 if self._is_exact else 2)
        self._builder = PlanBuilder(
            f"coded {kind.name.lower()}",
            world=world,
            rank=rank,
            signature=coded(signature(kind, type_code=dtype), coding),
            buffer_bytes=[given, CountRange(output, output + world)],
            scratch_bytes=CountRange(self._codes_at, count_count),
            count_count=count_count,
            unit_bytes=1,
        )
        # Parts are coded one after another, so that messages leave in list order (docs/reference/plans.md rule 4).
        self._coded: dict[int, int] = {}

    def build(self) -> Plan:
        return self._builder.build()

    def send(self, part: int, peers: Sequence[int], *, source: int, first_index: CountRange) -> None:
        if not peers:
            return
        made = self._encode(part, source, first_index)
        length, codes = self._length(part), self._codes(part)
        for peer in peers:
            if self._is_exact:
                self._builder.send(peer, 1, Operand(self._scratch, self._place(length)), length, after=[made])
            place = Operand(self._scratch, self._place(codes))
            self._builder.send(peer, 0, place, codes, after=[made], has_length=self._is_exact)

    def keep(self, part: int, into: int, *, source: int, first_index: CountRange) -> int:
        """Writes the part that stays on this rank. Like the methods below, it returns the step after which the part is
        in the output."""
        if self._is_exact:
            return self.copy(part, into, source=source)
        made = self._coded[part] if part in self._coded else self._encode(part, source, first_index)
        return self._decode(part, into, made)

    def copy(self, part: int, into: int, *, source: int) -> int:
        return self._builder.copy(Operand(0, source), 1, self._offset(into), self._elements(part))

    def send_plain(self, peer: int, slot: int, part: int, source: Operand, *, after: Sequence[int] = ()) -> None:
        self._builder.send(peer, slot, source, self._elements(part), after=after)

    def receive_plain(self, peer: int, slot: int, part: int) -> int:
        return self._builder.recv(peer, slot, 1, self._offset(part), self._elements(part))

    def receive(self, peer: int, part: int) -> int:
        length, codes, after = self._length(part), self._codes(part), list[int]()
        if self._is_exact:
            after = [self._builder.recv(peer, 1, self._scratch, self._place(length), length)]
        place = self._place(codes)
        come = self._builder.recv(peer, 0, self._scratch, place, codes, after=after, has_length=self._is_exact)
        return self._decode(part, part, come, peer)

    def _encode(self, part: int, source: int, first_index: CountRange) -> int:
        self._coded[part] = self._builder.encode(
            Operand(0, source),
            self._scratch,
            self._place(self._codes(part)),
            self._elements(part),
            dtype=self._dtype,
            coding=self._coding,
            first_index=first_index,
            after=list(self._coded.values())[-1:],
        )
        return self._coded[part]

    def _decode(self, part: int, into: int, after: int, peer: int = 0) -> int:
        return self._builder.decode(
            Operand(self._scratch, self._place(self._codes(part))),
            1,
            self._offset(into),
            self._elements(into),
            dtype=self._dtype,
            coding=self._coding,
            after=[after],
            peer=peer,
        )

    def _elements(self, part: int) -> CountRange:
        return CountRange(self._elements_at + part, self._elements_at + part + 1)

    def _offset(self, part: int) -> CountRange:
        return CountRange(self._output, self._elements_at + part)

    def _length(self, part: int) -> CountRange:
        first = self._codes_at + 2 * part
        return CountRange(first, first + 1)

    def _codes(self, part: int) -> CountRange:
        first = self._codes_at + (2 * part + 1 if self._is_exact else part)
        return CountRange(first, first + 1)

    def _place(self, size: CountRange) -> CountRange:
        return CountRange(self._codes_at, size.first)
