# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter with a codec, of counts at run time: the first half of the coded allreduce. Results are not coded,
because they stay.

Rank j gets fold(Q(share j of rank 0), Q(share j of rank 1), ...). Blocks begin where shares do. Element i of rank r's
vector has the logical index r · elements + i. Every share is cut into the same number of pieces, as in
reduce_scatter_counted.py. Counts are bytes: of what comes before this rank's vector, of the elements of each piece, of
their codes, and of the pieces of the own share as float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.transport.algorithms.coded_parts import CHUNKS_IN_WORK, DEFAULT_CHUNK_ELEMENTS, Ring, chunk_limit
from sennit.transport.algorithms.ranges import peers_after, peers_before
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.coding import Coding
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype, ReduceOp, check_reducible
from sennit.transport.plans.plan import Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, coded, signature


def coded_pieces(counts: Sequence[int], coding: Coding, chunk_elements: int = DEFAULT_CHUNK_ELEMENTS) -> int:
    """Into how many pieces the largest share is cut: a power of two, so that few plans serve all calls."""
    chunks = -(-max(counts) // chunk_limit(coding, chunk_elements))
    return 1 << max(chunks - 1, 0).bit_length()


def reduce_scatter_counts(rank: int, counts: Sequence[int], pieces: int, dtype: Dtype, coding: Coding) -> list[int]:
    """The counts of `reduce_scatter_coded`, from the elements of each share."""
    cut = []
    for count in counts:
        size = -(-count // (pieces * coding.unit)) * coding.unit
        cut += [min(size, max(count - piece * size, 0)) for piece in range(pieces)]
    own = cut[rank * pieces : (rank + 1) * pieces]
    elements = [count * dtype.item_bytes for count in (rank * sum(counts), *cut)]
    return [*elements, *map(coding.coded_bytes, cut), *(count * Dtype.F32.item_bytes for count in own)]


def reduce_scatter_coded(
    *,
    world: int,
    rank: int,
    pieces: int,
    dtype: Dtype,
    op: ReduceOp,
    coding: Coding,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
) -> Plan:
    """Buffers: `[input, output]`. `dtype` is F32, F16 or BF16. Counts: `reduce_scatter_counts`.

    Raises ArgumentError for PREMUL_SUM of 16-bit elements, whose decoded numbers are partial sums.
    """
    check_reducible(dtype, op)
    if op is ReduceOp.PREMUL_SUM and dtype is not Dtype.F32:
        raise ArgumentError(f"PREMUL_SUM of {dtype.name} with a codec; allowed: F32")
    own, scratch = rank * pieces, 2
    codes_at = 1 + world * pieces
    sums_at = codes_at + world * pieces
    builder = PlanBuilder(
        "coded reduce_scatter",
        world=world,
        rank=rank,
        signature=coded(signature(Kind.REDUCE_SCATTER, type_code=dtype, op=op), coding),
        buffer_bytes=[CountRange(1, codes_at), CountRange(1 + own, 1 + own + pieces)],
        count_count=sums_at + pieces,
        unit_bytes=1,
    )
    most = chunk_limit(coding, chunk_elements)
    coded_room, sum_room = (-(-size // 64) * 64 for size in (coding.coded_bytes(most), most * Dtype.F32.item_bytes))

    def ring(room: int) -> Ring:
        return Ring(builder.reserve_scratch(CHUNKS_IN_WORK * room), room, CHUNKS_IN_WORK)

    rings = {peer: ring(coded_room) for peer in range(world)}
    sums = ring(world * sum_room)
    last: dict[int, list[int]] = {peer: [] for peer in range(world)}

    def encode(owner: int, piece: int) -> tuple[Operand, list[int]]:
        """Returns the codes of a piece, and the list of the steps that read them."""
        number = 1 + owner * pieces + piece
        place, before, users = rings[owner].take()
        made = builder.encode(
            Operand(0, CountRange(1, number)),
            scratch,
            place,
            CountRange(number, number + 1),
            dtype=dtype,
            coding=coding,
            first_index=CountRange(0, number),
            after=[*before, *last[owner]],
        )
        last[owner] = [made]
        return Operand(scratch, place), users

    def decode(source: Operand, offset: int, piece: int, after: Sequence[int]) -> int:
        size_bytes = CountRange(sums_at + piece, sums_at + piece + 1)
        return builder.decode(source, scratch, offset, size_bytes, dtype=Dtype.F32, coding=coding, after=after)

    def codes(owner: int, piece: int) -> CountRange:
        first = codes_at + owner * pieces + piece
        return CountRange(first, first + 1)

    for piece in range(pieces):
        for peer in peers_after(rank, world):
            source, users = encode(peer, piece)
            users.append(builder.send(peer, piece, source, codes(peer, piece), after=last[peer]))
        start, before, readers = sums.take()
        source, users = encode(rank, piece)
        users.append(decode(source, start + rank * sum_room, piece, [*last[rank], *before]))
        made = [users[-1]]
        for peer in peers_before(rank, world):
            loan = builder.loan(peer, piece, codes(rank, piece))
            made.append(decode(Operand(loan, 0, is_view=True), start + peer * sum_room, piece, before))
        # The decoded numbers of 16-bit types count as partial sums.
        operands = [
            Operand(scratch, start + peer * sum_room, is_partial=dtype is not Dtype.F32) for peer in range(world)
        ]
        first = 1 + own + piece
        offset, size_bytes = CountRange(1 + own, first), CountRange(first, first + 1)
        readers.append(builder.reduce(operands, 1, offset, size_bytes, dtype=dtype, op=op, after=made))
    return builder.build()
