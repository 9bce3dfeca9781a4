# SPDX-License-Identifier: Apache-2.0
"""Alltoall and allgather with a codec: parts are coded by their sender, also the one that stays, and decoded at once.

Blocks begin where parts do. An allgather has the logical indices of its result. In an alltoall, element i of what rank
r gives has r · 2^40 + i, because what ranks give has no common order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from sennit.transport.algorithms.coded_parts import CHUNKS_IN_WORK, DEFAULT_CHUNK_ELEMENTS, Ring, chunk_limit, cut
from sennit.transport.algorithms.ranges import Range, check_counts, peers_after, peers_before
from sennit.transport.coding import Coding
from sennit.transport.elements import Dtype
from sennit.transport.plan import Operand, Plan, PlanBuilder
from sennit.transport.signature import Kind, coded, signature

# Ranks of an alltoall draw random numbers of their own.
RANK_SHIFT: Final = 40


@dataclass(frozen=True, slots=True)
class _Given:
    """A range of the input, in elements, and the ranks that get it."""

    part: Range
    ranks: Sequence[int]
    first_index: int


def alltoall_coded(
    *,
    world: int,
    rank: int,
    sent: Sequence[int],
    received: Sequence[int],
    dtype: Dtype,
    coding: Coding,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
) -> Plan:
    """`sent[j]` elements go to rank j, `received[j]` come from it. Buffers: `[input, output]`."""
    check_counts("sent", sent, world)
    check_counts("received", received, world)
    parts = _ranges(sent)
    given = [
        _Given(parts[peer], [peer], (rank << RANK_SHIFT) + parts[peer].offset) for peer in peers_after(rank, world)
    ]
    given.append(_Given(parts[rank], [rank], (rank << RANK_SHIFT) + parts[rank].offset))
    builder = _builder(Kind.ALLTOALL, world, rank, dtype, coding, sum(sent), sum(received))
    return _exchange(builder, rank, given, _ranges(received), dtype, coding, chunk_elements)


def allgather_coded(
    *,
    world: int,
    rank: int,
    counts: Sequence[int],
    dtype: Dtype,
    coding: Coding,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
) -> Plan:
    """Rank j gives `counts[j]` elements. Buffers: `[input, output]`."""
    check_counts("counts", counts, world)
    parts = _ranges(counts)
    given = [_Given(Range(0, counts[rank]), [*peers_after(rank, world), rank], parts[rank].offset)]
    builder = _builder(Kind.ALLGATHER, world, rank, dtype, coding, counts[rank], sum(counts))
    return _exchange(builder, rank, given, parts, dtype, coding, chunk_elements)


def _builder(kind: Kind, world: int, rank: int, dtype: Dtype, coding: Coding, given: int, taken: int) -> PlanBuilder:
    return PlanBuilder(
        f"coded {kind.name.lower()}",
        world=world,
        rank=rank,
        signature=coded(signature(kind, type_code=dtype), coding),
        buffer_bytes=[given * dtype.item_bytes, taken * dtype.item_bytes],
    )


def _exchange(
    builder: PlanBuilder,
    rank: int,
    given: Sequence[_Given],
    taken: Sequence[Range],
    dtype: Dtype,
    coding: Coding,
    chunk_elements: int,
) -> Plan:
    most, item_bytes, scratch = chunk_limit(coding, chunk_elements), dtype.item_bytes, 2
    outgoing = [cut(one.part, most) for one in given]
    incoming = [cut(part, most) for part in taken]
    rooms = [-(-coding.coded_bytes(chunks[0].size_bytes) // 64) * 64 for chunks in outgoing]
    rings = [Ring(builder.reserve_scratch(CHUNKS_IN_WORK * room), room, CHUNKS_IN_WORK) for room in rooms]
    # Chunks are coded one after another, so messages leave in list order (docs/reference/plans.md rule 4).
    last: list[list[int]] = [[] for _ in given]

    def decode(source: Operand, place: Range, after: Sequence[int]) -> int:
        return builder.decode(
            source,
            1,
            place.offset * item_bytes,
            place.size_bytes * item_bytes,
            dtype=dtype,
            coding=coding,
            after=after,
        )

    for turn in range(max(map(len, [*outgoing, *incoming]))):
        for number, one in enumerate(given):
            if turn >= len(outgoing[number]):
                continue
            chunk = outgoing[number][turn]
            size_bytes = coding.coded_bytes(chunk.size_bytes)
            place, before, users = rings[number].take()
            if size_bytes:
                last[number] = [
                    builder.encode(
                        Operand(0, chunk.offset * item_bytes),
                        scratch,
                        place,
                        chunk.size_bytes * item_bytes,
                        dtype=dtype,
                        coding=coding,
                        first_index=one.first_index + chunk.offset - one.part.offset,
                        after=[*before, *last[number]],
                    )
                ]
            for peer in one.ranks:
                if peer != rank:
                    users.append(builder.send(peer, turn, Operand(scratch, place), size_bytes, after=last[number]))
                elif size_bytes:
                    users.append(decode(Operand(scratch, place), incoming[rank][turn], last[number]))
        for peer in peers_before(rank, len(taken)):
            if turn >= len(incoming[peer]):
                continue
            chunk = incoming[peer][turn]
            if chunk.size_bytes:
                loan = builder.loan(peer, turn, coding.coded_bytes(chunk.size_bytes))
                decode(Operand(loan, 0, is_view=True), chunk, [])
            else:
                builder.recv(peer, turn, scratch, 0, 0)
    return builder.build()


def _ranges(counts: Sequence[int]) -> list[Range]:
    return [Range(low, count) for low, count in zip(accumulate(counts, initial=0), counts, strict=False)]
