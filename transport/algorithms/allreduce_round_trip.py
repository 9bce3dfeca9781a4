# SPDX-License-Identifier: Apache-2.0
"""Allreduce inside a host: every share makes a round trip to the rank that folds it.

As in the direct algorithm, rank j folds share j. But it has the vectors of the others as loans that come back: the fold
writes its result over them, and no result is sent. In symmetric memory nothing is copied at all: rank j folds the
shares where they are and writes the result to the same places. In other memory a share is copied to a block and back.
"""

from __future__ import annotations

from itertools import zip_longest

from sennit.transport.algorithms.leaves import Leaves, allreduce_builder
from sennit.transport.algorithms.ranges import (
    DEFAULT_CHUNK_BYTES,
    check_chunk,
    chunks,
    peers_after,
    peers_before,
    shares,
)
from sennit.transport.elements import Dtype, ReduceOp
from sennit.transport.plan import Operand, Plan


def allreduce_round_trip(
    *,
    world: int,
    rank: int,
    elements: int,
    dtype: Dtype,
    op: ReduceOp,
    in_place: bool = True,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Plan:
    """Buffers: those of `allreduce_builder`. Needs shared memory between all ranks."""
    check_chunk(chunk_bytes)
    builder, result = allreduce_builder(
        "allreduce by round trips",
        Leaves(world),
        rank=rank,
        elements=elements,
        dtype=dtype,
        op=op,
        in_place=in_place,
        round_trips=True,
    )
    cut = [
        [(share.offset + chunk.offset, chunk.size_bytes) for chunk in chunks(share.size_bytes, chunk_bytes)]
        if share.size_bytes
        else []
        for share in shares(elements, world, dtype.item_bytes)
    ]
    # Chunk by chunk, so that a rank folds while it lends.
    for slot, of_ranks in enumerate(zip_longest(*cut)):
        for peer in peers_after(rank, world):
            if of_ranks[peer] is None:
                continue
            offset, size_bytes = of_ranks[peer]
            copied = [] if result == 0 else [builder.copy(Operand(0, offset), result, offset, size_bytes)]
            builder.send(peer, slot, Operand(result, offset), size_bytes, after=copied, comes_back=True)
        if of_ranks[rank] is None:
            continue
        offset, size_bytes = of_ranks[rank]
        operands = [Operand(0, offset)] * world
        for peer in peers_before(rank, world):
            operands[peer] = Operand(builder.loan(peer, slot, size_bytes, comes_back=True), is_view=True)
        builder.reduce(operands, result, offset, size_bytes, dtype=dtype, op=op, comes_back=world > 1)
    return builder.build()
